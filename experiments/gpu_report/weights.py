"""Random weights, drawn while the device is measured: one core's work for half a minute, and nobody waits for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

from experiments.gpu_report.estimates import WEIGHT_S
from tkernels.isolation import Prepare, Server, ServerError, Tell
from tmodel import RANDOM_PRESETS, preset_path
from tmodel.random_weights import num_parameters


def draw_s(model: str) -> float:
    """Seconds that drawing a preset's weights takes one core, by estimate."""
    return WEIGHT_S * num_parameters(RANDOM_PRESETS[model])


@contextmanager
def drawing(models: Sequence[str]) -> Iterator[None]:
    """Has the presets' weights made, one after the other, in a process that ends with the context. Who asks for one
    that is under way waits for it, as `preset_path` says.
    """
    if not models:
        yield
        return
    with Server({"TRITON_INTERPRET": "0"}) as server:
        server.load("experiments.gpu_report.weights:prepare")

        def draw() -> None:
            with suppress(ServerError, ValueError):  # the context has ended first, and with it the server and its pipe
                server.run(list(models), lambda message: None)

        Thread(target=draw, daemon=True).start()
        yield


def prepare(about: None) -> Prepare:
    """In a server: a task is names of presets."""

    def make(models: Sequence[str], tell: Tell) -> None:
        for name in models:
            preset_path(name)

    return lambda models: lambda tell: make(models, tell)
