"""What is wrong between the sections of an experiment, and with the files beside it.

Read from the data as it was written, so that other faults hide none of it.
"""

from experiments.document import Document, ExperimentError, PathParts, entries
from experiments.schema import Experiment, VariantChoice
from experiments.schema.experiment import written_choices
from experiments.schema.names import KnownNames, unknown_name
from experiments.simulation.trace_files import read_trace


def written_problems(document: Document, names: KnownNames) -> list[str]:
    """Unknown ops and variants, traces that cannot be read, and sections that do not go together."""
    return [*_variant_problems(document, names), *_trace_problems(document), *_section_problems(document)]


def _variant_problems(document: Document, names: KnownNames) -> list[str]:
    """Ops and variants that do not exist."""
    problems = []
    perhaps = "" if names.is_complete else " (unless it is in the folder that is missing)"
    for section in ("kernels", "shapes"):
        written = document.data.get(section)
        for op in written if isinstance(written, dict) else ():
            if op not in names.variants:
                problems.append(document.problem((section, op), unknown_name("op", op, names.variants) + perhaps))
                continue
            for index, choice in enumerate(written_choices(document, op) if section == "kernels" else ()):
                if isinstance(choice, VariantChoice) and choice.variant not in names.variants[op]:
                    message = unknown_name(f"{op} variant", choice.variant, names.variants[op])
                    problems.append(document.problem((section, op, index), message + perhaps))
    return problems


def _trace_problems(document: Document) -> list[str]:
    """Traces that cannot be read, or have fewer requests than are asked for."""
    problems = []
    for index, entry in enumerate(entries(document.data.get("workload"))):
        given = entry if isinstance(entry, dict) and entry.get("kind") == "trace" else {}
        if isinstance(given.get("file"), str):
            where: PathParts = ("workload", index, "file")
            try:
                count = len(list(read_trace(document.folder / given["file"])))
            except (ExperimentError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                problems.append(document.problem(where, f"{given['file']}: {reason}" if reason else str(error)))
                continue
            asked = [one for one in entries(given.get("num_requests")) if isinstance(one, int)]
            if any(one > count for one in asked):
                message = f"{max(asked)} of a trace of {count}"
                problems.append(document.problem(("workload", index, "num_requests"), message))
    return problems


def _section_problems(document: Document) -> list[str]:
    """Sections that do not go together, told from what is written, be it as it should be or not."""
    given = document.data
    workloads, batching = entries(given.get("workload")), entries(given.get("batching"))
    messages = []
    if not given.keys() - Experiment.model_fields.keys():  # else what is missing may be there by a wrong name
        if workloads and not given.get("model"):
            messages.append("a workload needs a model")
        if given.get("quantization") and not given.get("model"):
            messages.append("quantization needs a model")
        if given.get("peers") and not workloads:
            messages.append("peers serve a workload; there is none")
        if not given.get("model") and not given.get("kernels"):
            messages.append("there is nothing to do: neither a model nor kernels are given")
    if "static" in batching and any(isinstance(one, dict) and one.get("late") for one in workloads):
        messages.append("static batching is of requests that are all there: it goes with no late ones")
    problems = [document.problem((), message) for message in messages]
    names = [repr(one.get("name", "")) for one in workloads if isinstance(one, dict)]
    if len(set(names)) < len(names):
        problems.append(document.problem(("workload",), "each workload of a list needs a name of its own"))
    return problems
