"""`tk serve`: a model behind OpenAI's routes."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.commands.requests import ServeRequest
from experiments.document import ExperimentError, read_document
from experiments.option_flags import engine_options, parse_kernels
from tsched.options import OptionError
from tsched.serving.limits import ServerLimits

_EXTRA = ("fastapi", "uvicorn", "limits", "prometheus_client")


def run(request: ServeRequest) -> int:
    """Serves until a signal ends it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ExperimentError([f"tk serve needs {', '.join(missing)}: pip install 'tkernels[serve]'"])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    served = read_served(Path(request.model)) if request.model.endswith((".yaml", ".yml")) else None
    if served is None:
        served = _served_by_flags(request)
    elif request.engine or request.kernels or request.variants_from or request.architectures_from:
        raise ExperimentError([f"{request.model}: says kernels and the engine's options itself; leave out their flags"])
    from tsched.serving.auth import KeyFileError, read_keys
    from tsched.serving.listening import ServerStartError, open_socket
    from tsched.serving.supervisor import SupervisedClient

    limits = _make_limits({**served.limits, **request.limits})
    try:
        keys = None if request.api_key_file is None else read_keys(request.api_key_file)
        listening = open_socket(request.host, request.port)
        client = SupervisedClient(
            served.model,
            request.name,
            stall_timeout=limits.stall_timeout,
            variants_from=served.variants_from,
            **served.engine,
            kernels=served.kernels,
        )
        client.start_early()
        from tsched.serving.app import create_app  # takes as long as a third of torch, beside it
        from tsched.serving.http import serve

        app = create_app(client, limits, keys=keys, chat_template=request.chat_template)
        host, port = listening.getsockname()[:2]
        print(f"serving {served.model} at http://{host}:{port}/v1", flush=True)
        serve(app, listening)
    except (KeyFileError, ServerStartError) as error:
        raise ExperimentError([str(error)]) from None
    return 0


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        model: As of AsyncLLM.
        kernels: Op -> variant, or variant -> pins.
        engine: The engine's other options.
        limits: Those of the server that are not at their defaults.
        variants_from: Folders of more kernel variants.
    """

    model: str
    kernels: Mapping[str, Any]
    engine: Mapping[str, Any]
    limits: Mapping[str, Any]
    variants_from: Sequence[str]


def _make_limits(given: Mapping[str, Any]) -> ServerLimits:
    """The record of the limits that were given; ExperimentError names one that is wrong."""
    try:
        return ServerLimits(**given)
    except OptionError as error:
        raise ExperimentError([str(error)]) from None


def _served_by_flags(request: ServeRequest) -> Served:
    engine_options(request.engine)
    engine = {**request.engine, "architectures_from": [str(folder) for folder in request.architectures_from]}
    return Served(
        request.model, parse_kernels(request.kernels), engine, {}, [str(one) for one in request.variants_from]
    )


def read_served(file: Path) -> Served:
    """What an experiment's sections `model` to `serving` say of a server. Loads no torch.

    Raises:
        ExperimentError: It is no sound experiment, has no model, or has an axis: a server has one arm.
    """
    from experiments.planning.layout import lay_out  # the whole schema, which flags need nothing of

    layout = lay_out(read_document(file))[0]
    experiment, source = layout.experiment, layout.parts[0].model
    (arm, *others), several = layout.parts[0].arms, len(layout.parts) > 1
    if others or several:
        axes = ", ".join(arm.swept) or "several engines"
        raise ExperimentError([f"{file}: a server has one arm, and this sweeps {axes}: leave one value of each"])
    if arm.batching == "static":
        raise ExperimentError([f"{file}: batching: a server batches continuously"])
    if source is None:
        raise ExperimentError([f"{file}: model: a server needs one"])
    folder = file.resolve().parent
    model = source.preset or source.hub or str(folder / str(source.path))
    engine: dict[str, Any] = {
        **arm.scheduler,
        "tuning": experiment.tuning,
        "architectures_from": [str(folder / one) for one in experiment.architectures_from],
    }
    given = {"dtype": layout.parts[0].dtype, "device": experiment.device}
    engine |= {name: str(value) for name, value in given.items() if value is not None}
    limits = {} if experiment.serving is None else experiment.serving.model_dump(exclude_unset=True)
    return Served(model, arm.choices, engine, limits, [str(folder / one) for one in experiment.variants_from])
