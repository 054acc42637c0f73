"""`tk serve`: a model behind OpenAI's routes."""

import gc
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.commands.requests import ServeRequest
from experiments.document import ExperimentError, read_document
from experiments.option_flags import engine_options, parse_kernels
from tsched.options import OptionError
from tsched.serving.limits import LIMITS, ServerLimits

if TYPE_CHECKING:
    from tsched.serving.front_end import FrontEnd

_STDERR = 2
_LOOPBACK = ("127.", "::1")


def run(request: ServeRequest) -> int:
    """Serves until a signal ends it."""
    if missing := _find_missing():
        raise ExperimentError([f"tk serve needs {', '.join(missing)}: pip install 'tkernels[serve]'"])
    served = read_served(Path(request.model)) if request.model.endswith((".yaml", ".yml")) else None
    if served is None:
        served = _served_by_flags(request)
    elif request.engine or request.kernels or request.variants_from or request.architectures_from:
        raise ExperimentError([f"{request.model}: says kernels and the engine's options itself; leave out their flags"])
    from tsched.serving.auth import KeyFileError, read_keys
    from tsched.serving.listening import ServerStartError, allow_all_files, open_socket
    from tsched.serving.supervisor import SupervisedClient

    limits = _make_limits({**served.limits, **request.limits})
    _check_template(request.chat_template)
    began = time.monotonic()
    try:
        keys = None if request.api_key_file is None else read_keys(request.api_key_file)
        allow_all_files()
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
        from tsched.serving.logs import log_lines

        app = create_app(client, limits, keys=keys, chat_template=request.chat_template)
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        _say(f"listening at http://{address}:{port}/v1; loading {served.model}")
        if keys is None and not host.startswith(_LOOPBACK):
            _say("without --api-key-file whoever reaches this address may ask")
        with log_lines(_STDERR):
            serve(app, listening, lambda front: _say(*describe_ready(front, time.monotonic() - began)))
        gc.freeze()  # the end of the process would go through all that was imported, for a tenth of a second
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


def _find_missing() -> list[str]:
    """The packages of the extra `serve` that are not installed."""
    found = [re.match(r"([\w.-]+).*; extra == .serve.$", one) for one in requires("tkernels") or ()]
    return [one[1] for one in found if one is not None and not _is_installed(one[1])]


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _check_template(file: Path | None) -> None:
    """Refuses a file that is no chat template before the model is loaded."""
    if file is not None:
        from tsched.requests.chat_template import ChatTemplate, ChatTemplateError

        try:
            ChatTemplate(file.read_text(encoding="utf-8"), {})
        except (ChatTemplateError, UnicodeDecodeError) as error:
            raise ExperimentError([f"{file}: {error}"]) from None


def describe_ready(front: "FrontEnd", seconds: float) -> list[str]:
    """What is served, by which kernels, and the limits that are not at their defaults.

    Args:
        front: With its model loaded.
        seconds: That it took.
    """
    facts, usual = front.client.facts, ServerLimits()
    ops: dict[str, list[str]] = {}
    for op, variant in sorted(facts.arm.items()):
        ops.setdefault(variant, []).append(op)
    given = {name: getattr(front.limits, name) for name in LIMITS}
    limits = [f"{name} {value}" for name, value in given.items() if value != getattr(usual, name)]
    return [
        f"ready after {seconds:.1f} s: {facts.name}, {facts.max_model_len} tokens a request at most, "
        f"{facts.max_num_seqs} requests a step, a KV cache of {facts.num_cache_tokens} tokens",
        *(f"kernels: {variant} for {', '.join(names)}" for variant, names in ops.items()),
        f"limits: {', '.join(limits)}, the others by default",
    ]


def _say(*lines: str) -> None:
    """Prints at once; where nobody can read it any more, the server goes on."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for the rest of the process


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
