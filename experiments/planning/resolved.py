"""A sweep as YAML that makes the same sweep wherever it lies: arm by arm, and in the same names."""

from collections.abc import Mapping
from typing import Any

import yaml

from experiments.document import Document, entries
from experiments.planning.axes import Axis
from experiments.planning.layout import with_whole_path
from experiments.planning.model_names import whole_sources
from experiments.planning.plan import Sweep
from experiments.planning.zip_and_exclude import matching_indices
from experiments.schema import Experiment
from experiments.schema.workload import AXES


def resolved_text(sweep: Sweep) -> str:
    """resolved.yaml."""
    return yaml.safe_dump(resolved(sweep), sort_keys=False, width=100, allow_unicode=True)


def resolved(sweep: Sweep) -> dict[str, Any]:
    """The experiment with what it left open filled in, of the sizes that were run; its paths are absolute.

    Every axis has all the values that the document gives it, those too of which the rules leave nothing: the rules name
    them. What is filled in is no axis that a rule or a group names, or would be another one there.
    """
    plan, experiment, document = sweep.plans[0], sweep.experiment, sweep.document
    written = document.data
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    data["device"] = str(plan.device)
    dtypes = {each.dtype_name for each in sweep.plans}
    if written.get("dtype") is not None:
        data["dtype"] = written["dtype"]
    elif len(dtypes) == 1:
        (data["dtype"],) = dtypes  # else each model has its own
    if experiment.model:
        data["model"] = whole_sources(written["model"], document.folder)
    data["scheduler"] = _resolve_scheduler(written.get("scheduler"))
    if experiment.workload:
        found = [_resolve_workload(document, experiment, entry) for entry in entries(written["workload"])]
        data["workload"] = found if isinstance(written["workload"], list) else found[0]
    if experiment.shapes:
        data["shapes"] = written["shapes"]
    for name in ("text", "calibration"):
        if experiment.quantization is not None and (file := getattr(experiment.quantization, name)) is not None:
            data["quantization"][name] = str((document.folder / file).resolve())
    data["variants_from"] = [str(folder) for folder in plan.variant_folders]
    data["architectures_from"] = [str(folder) for folder in plan.architecture_folders]
    data["zip"], data["exclude"] = written.get("zip"), _resolve_rules(document)
    del data["full"]
    return {key: data[key] for key in type(experiment).model_fields if data.get(key) not in (None, {}, [])}


def _resolve_scheduler(written: Any) -> Any:
    """Options in the one form of lists; values as they are in rows: 0 is not 0.0."""
    found = [
        {option: entries(value) for option, value in options.items() if entries(value)} for options in entries(written)
    ]
    return found[0] if len(found) == 1 else found


def _resolve_workload(document: Document, experiment: Experiment, written: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `workload`, with its defaults. Axes are as they were written where they are lists, or named."""
    name = written.get("name", "")
    known = [one for one in experiment.workload if one.name == name]
    whole = with_whole_path(written, document.folder)
    if not known:  # the rules leave nothing of it
        return whole
    found = known[0].model_dump(mode="json", exclude_none=True)
    named = _named_paths(document)
    for field in dict.fromkeys(axis.partition(".")[0] for axis in AXES[known[0].kind]):
        given = whole.get(field)
        if isinstance(given, list) or field == "late" or f"workload.{field}" in named:
            found.pop(field, None)
            found |= {field: given} if given is not None else {}
    return found


def _named_paths(document: Document) -> set[str]:
    """The axes that rules and groups name."""
    groups, rules = (entries(document.data.get(section)) for section in ("zip", "exclude"))
    return {path for some in (*groups, *rules) for path in some}


def _resolve_rules(document: Document) -> list[dict[str, Any]]:
    """`exclude`, with models as rows call them: a path may be written in many ways."""
    rules = entries(document.data.get("exclude"))
    axis = Axis.written("model", whole_sources(document.data.get("model"), document.folder))

    def called(one: Any) -> list[str]:
        return [axis.labels[index] for index in sorted(matching_indices(axis, "model", one, document.folder))]

    return [
        {
            path: [label for one in entries(value) for label in called(one)] if path == "model" else value
            for path, value in rule.items()
        }
        for rule in rules
    ]
