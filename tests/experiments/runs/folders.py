"""Run folders written by hand."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.runs.rows import SCHEMA, VERSION

RESOLVED: Mapping[str, Any] = {"name": "test", "kernels": {"swiglu": ["torch", "fused"]}, "dtype": "float32"}
ENVIRONMENT: Mapping[str, Any] = {
    "device": {"name": "some CPU", "type": "cpu"},
    "host": {"torch_threads": 1},
    "versions": {"torch": "2.13", "triton": "3.5"},
    "git": {"commit": "c" * 40, "dirty": False},
}
UNTIMED = {
    "bytes_moved": 8, "flops": 1, "config": None, "iqr_us": 0.1, "min_us": 1.9, "max_us": 2.2, "samples_us": [1.9, 2.2],
    "timer": "perf_counter", "speed_reason": None, "roofline_fraction": None, "roofline_bound": None,
    "roofline_reason": "no roofline is known for a CPU",
}  # fmt: skip


def kernel_row(median_us: float, variant: str = "torch", replicate: int = 0, **more: Any) -> dict[str, Any]:
    """A line of results.jsonl: one variant's time, of a task that wrote nothing else."""
    return {
        "run_id": "0123abcd", "stage": "kernels", "task": f"kernels swiglu {variant} {replicate}",
        "replicate": replicate, "task_rows": 1, "arm": {"swiglu": variant}, "settings": {}, "op": "swiglu",
        "variant": variant, "axes": {"T": 2, "I": 8}, "serves": None, "dtype": "float32", "device": "cpu",
        "status": "ok", "reason": None, "not_finite": None, "host_peak_bytes": None,
        "device_peak_bytes": None, "load_before": None, "load_after": None, "yardstick_us": None, "point": "decode",
        "median_us": median_us, **UNTIMED, **more,
    }  # fmt: skip


def write_run(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    resolved: Mapping[str, Any] = RESOLVED,
    environment: Mapping[str, Any] = ENVIRONMENT,
    **meta: Any,
) -> Path:
    """A finished run; `meta` goes over what run.json has."""
    folder.mkdir(parents=True)
    text = yaml.safe_dump(dict(resolved), sort_keys=False).encode()
    (folder / "resolved.yaml").write_bytes(text)
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "schema": SCHEMA, "rows_version": VERSION, "run_id": "0123abcd", "name": "test",
        "created": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T03:05:05+00:00",
        "resolved_sha256": hashlib.sha256(text).hexdigest(), "tasks": 1,        "executor": "local",
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**about, **meta}))
    return folder
