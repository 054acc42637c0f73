"""One run's folder: the YAML as written and resolved, environment.json, and results.jsonl, a row for each fact."""

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.document import ExperimentError
from experiments.plan import Plan, Sweep
from experiments.rows import CheckRow, EngineRow, KernelRow, ParityRow, PeerRow, QuantizationRow, StepRow

AnyRow = CheckRow | KernelRow | EngineRow | ParityRow | StepRow | PeerRow | QuantizationRow


SOURCE = "experiment.yaml"
"""The experiment as it was written: its comments say what it asks."""


class RunFolder:
    """Open for the length of a run. `rows` holds what was recorded so far, in order."""

    def __init__(self, sweep: Sweep, out: Path | None) -> None:
        """Makes the folder: `out`, which must be new or empty, or runs/<name>-<time>-<id>/ under the current one."""
        self.run_id = secrets.token_hex(4)
        name = f"{sweep.experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}-{self.run_id}"
        self.path = out if out is not None else Path("runs") / name
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ExperimentError([f"--out {self.path}: exists and is not an empty folder"])
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExperimentError([f"{self.path}: cannot be made: {error.strerror}"]) from None
        self.rows: list[AnyRow] = []
        (self.path / SOURCE).write_text(sweep.document.text, encoding="utf-8")
        (self.path / "resolved.yaml").write_text(
            yaml.safe_dump(resolved(sweep), sort_keys=False, width=100, allow_unicode=True), encoding="utf-8"
        )

    def record(self, row: AnyRow) -> None:
        """Appends a row. The file is closed after each, so that a run that is killed keeps what it knew."""
        self.rows.append(row)
        with (self.path / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(row.as_json() + "\n")

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        text = json.dumps(environment, indent=2, default=str) + "\n"
        (self.path / "environment.json").write_text(text, encoding="utf-8")


def resolved(sweep: Sweep) -> dict[str, Any]:
    """The experiment with what it left open filled in, and its axes as they were written; it is a valid experiment
    itself, wherever it lies, of the sizes that were run.
    """
    plan, experiment, written = sweep.plans[0], sweep.experiment, sweep.document.data
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    if len(experiment.scheduler) == 1:
        (data["scheduler"],) = data["scheduler"]
    data["device"] = str(plan.device)
    dtypes = list(dict.fromkeys(each.dtype_name for each in sweep.plans))
    data["dtype"] = dtypes if isinstance(written.get("dtype"), list) else dtypes[0]
    if experiment.model is not None:
        sources = [_source_of(each) for each in sweep.plans]
        distinct = [source for index, source in enumerate(sources) if source not in sources[:index]]
        data["model"] = distinct if isinstance(written["model"], list) else distinct[0]
        if written.get("dtype") is None and len(dtypes) > 1:
            del data["dtype"]  # each model has its own
    if any(served.settings for each in sweep.plans for arm in each.arms for served in arm.workloads):
        data["workload"] = written["workload"]
    if experiment.shapes:
        data["shapes"] = written["shapes"]
    for name in ("text", "calibration"):
        if experiment.quantization is not None and (file := getattr(experiment.quantization, name)) is not None:
            data["quantization"][name] = str((plan.folder / file).resolve())
    data["variants_from"] = [str(folder) for folder in plan.variant_folders]
    del data["full"]
    return {key: data[key] for key in type(experiment).model_fields if data.get(key) not in (None, {}, [])}


def _source_of(plan: Plan) -> dict[str, str]:
    """A plan's model, wherever the experiment lies."""
    source = plan.experiment.model
    assert source is not None
    assert plan.model is not None
    if source.path is not None:
        return {"path": str(plan.model.directory().resolve())}
    found: dict[str, str] = source.model_dump(mode="json", exclude_none=True)
    return found
