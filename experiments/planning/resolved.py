"""A sweep as YAML that makes the same sweep wherever it lies: arm by arm, and in the same names."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from experiments.document import Document, entries
from experiments.planning.axes import model_axis
from experiments.planning.layout import with_whole_path
from experiments.planning.model_names import whole_source
from experiments.planning.plan import Sweep
from experiments.planning.zip_and_exclude import matching_values
from experiments.schema import Experiment


def resolved_text(sweep: Sweep) -> str:
    """resolved.yaml."""
    return yaml.safe_dump(resolved(sweep), sort_keys=False, width=100, allow_unicode=True)


def resolved(sweep: Sweep) -> dict[str, Any]:
    """The experiment with what it left open filled in, of the sizes that were run; its paths are absolute.

    Every axis has all the values that the document gives it, those too of which the rules leave nothing: the rules name
    them. What is filled in is no axis that a rule or a group names, or would be another one there.
    """
    plan, experiment, document = sweep.plans[0], sweep.experiment, sweep.document
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    data["device"] = str(plan.device)
    dtypes = {each.dtype_name for each in sweep.plans}
    if len(dtypes) == 1:  # else each model has its own
        (data["dtype"],) = dtypes
    data |= _resolve_axes(document, experiment)
    if experiment.quantization is not None:
        files = experiment.quantization.model_dump(include={"text", "calibration"}, exclude_none=True)
        data["quantization"] |= {name: str((document.folder / file).resolve()) for name, file in files.items()}
    data["variants_from"] = [str(folder) for folder in plan.variant_folders]
    data["architectures_from"] = [str(folder) for folder in plan.architecture_folders]
    del data["full"]
    return {key: data[key] for key in type(experiment).model_fields if data.get(key) not in (None, {}, [])}


def _resolve_axes(document: Document, experiment: Experiment) -> dict[str, Any]:
    """The sections whose lists are axes, and what names these, as they were written."""
    written = {key: value for key, value in document.data.items() if value is not None}
    changes: dict[str, Callable[[Any], Any]] = {
        "model": lambda source: whole_source(source, document.folder),
        # In the one form of lists, with the values as they are in rows: 0 is not 0.0.
        "scheduler": lambda options: {option: entries(value) for option, value in options.items() if entries(value)},
        "workload": lambda entry: _resolve_workload(document, experiment, entry),
        "exclude": lambda rule: _resolve_rule(document, rule),
    }
    data = {key: _map_entries(written.get(key, []), change) for key, change in changes.items()}
    return data | {key: written[key] for key in ("dtype", "shapes", "zip") if key in written}


def _map_entries(written: Any, change: Callable[[Any], Any]) -> Any:
    """A section that may be one thing without brackets, with each entry changed."""
    return [change(entry) for entry in written] if isinstance(written, list) else change(written)


def _resolve_workload(document: Document, experiment: Experiment, written: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `workload`, with its defaults."""
    known = [one for one in experiment.workload if one.name == written.get("name", "")]
    named = _named_paths(document)
    defaults = known[0].model_dump(mode="json", exclude_none=True) if known else {}  # the rules may leave none of it
    filled = {field: value for field, value in defaults.items() if f"workload.{field}" not in named}
    return filled | {
        key: value for key, value in with_whole_path(written, document.folder).items() if value is not None
    }


def _named_paths(document: Document) -> set[str]:
    """The axes that rules and groups name."""
    groups, rules = (entries(document.data.get(section)) for section in ("zip", "exclude"))
    return {path for some in (*groups, *rules) for path in some}


def _resolve_rule(document: Document, rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of `exclude`, with models as rows call them: a path may be written in many ways."""
    if "model" not in rule:
        return dict(rule)
    models = list(dict.fromkeys(entry["model"] for entry in model_axis(document)))
    found = [matching_values("model", models, one, document.folder) for one in entries(rule["model"])]
    return {**rule, "model": [model.label for some in found for model in some]}
