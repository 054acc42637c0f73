"""What is wrong between the sections of an experiment, and with the files beside it.

Read from the data as it was written, so that other faults hide none of it.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from experiments.document import Document, ExperimentError, PathParts, as_mapping, entries
from experiments.schema import Experiment, VariantChoice
from experiments.schema.experiment import written_choices
from experiments.schema.names import KnownNames, unknown_name
from experiments.simulation.trace_files import read_trace


def written_problems(document: Document, names: KnownNames) -> list[str]:
    """Unknown ops and variants, traces that cannot be read, and sections that do not go together."""
    return [*_variant_problems(document, names), *_trace_problems(document), *_section_problems(document)]


def _variant_problems(document: Document, names: KnownNames) -> Iterator[str]:
    """Ops and variants that do not exist."""
    perhaps = "" if names.is_complete else " (unless it is in the folder that is missing)"
    for section in ("kernels", "shapes"):
        for op in as_mapping(document.data.get(section)):
            if op not in names.variants:
                yield document.problem((section, op), unknown_name("op", op, names.variants) + perhaps)
                continue
            for index, choice in enumerate(written_choices(document, op) if section == "kernels" else ()):
                if isinstance(choice, VariantChoice) and choice.variant not in names.variants[op]:
                    message = unknown_name(f"{op} variant", choice.variant, names.variants[op])
                    yield document.problem((section, op, index), message + perhaps)


def _trace_problems(document: Document) -> Iterator[str]:
    """Traces that cannot be read, or have fewer requests than are asked for."""
    for index, written in enumerate(map(as_mapping, entries(document.data.get("workload")))):
        is_sent = written.get("kind") == "http"
        given = as_mapping(written.get("requests")) if is_sent else written
        place: PathParts = ("workload", index, "requests") if is_sent else ("workload", index)
        if given.get("kind") != "trace" or not isinstance(file := given.get("file"), str):
            continue
        try:
            count = len(list(read_trace(document.folder / file)))
        except (ExperimentError, OSError) as error:
            reason = f"{file}: {error.strerror}" if isinstance(error, OSError) else str(error)
            yield document.problem((*place, "file"), reason)
            continue
        most = max((one for one in entries(given.get("num_requests")) if isinstance(one, int)), default=0)
        if most > count:
            yield document.problem((*place, "num_requests"), f"{most} of a trace of {count}")


def _section_problems(document: Document) -> Iterator[str]:
    """Sections that do not go together, told from what is written, be it as it should be or not."""
    given = document.data
    if not given.keys() - Experiment.model_fields.keys():  # else what is missing may be there by a wrong name
        yield from (document.problem((), message) for message in _missing_sections(given))
    workloads = [as_mapping(one) for one in entries(given.get("workload"))]
    if "static" in entries(given.get("batching")) and any(one.get("late") for one in workloads):
        yield document.problem((), "static batching is of requests that are all there: it goes with no late ones")
    names = [repr(one.get("name", "")) for one in workloads]
    if len(set(names)) < len(names):
        yield document.problem(("workload",), "each workload of a list needs a name of its own")


def _missing_sections(given: Mapping[str, Any]) -> Iterator[str]:
    has = {section for section, value in given.items() if value}
    kinds = {as_mapping(one).get("kind") for one in entries(given.get("workload"))}
    if "model" not in has:
        if kinds - {"http"}:
            yield "a workload needs a model"
        if "quantization" in has:
            yield "quantization needs a model"
        if "kernels" not in has and "http" not in kinds:
            yield "there is nothing to do: neither a model nor kernels are given"
    if "http" in kinds and find_spec("httpx2") is None:
        yield "a workload over HTTP needs httpx2, which is not installed: pip install 'tkernels[serve]'"
    if "peers" in has and not kinds - {"http"}:
        yield "peers serve a workload; there is none"
