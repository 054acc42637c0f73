"""Recorded runs for the report to read: rows of every stage, some with texts that would be markup if they were let."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.runs.rows import COLUMNS, Row, Stage
from tests.experiments.runs.folders import ENVIRONMENT, write_run

EVIL = '<script>alert("1")</script> & $x_1$ \x1b[31m</svg>'
COMMON: dict[str, Any] = {"run_id": "0123abcd", "dtype": "float32", "device": "cpu"}
QUANTILES = {"p50": 0.001, "p90": 0.002, "p99": 0.004}
QUESTION = "# Which of these <b>is</b> faster? The second paragraph's\n# first half.\n#\n# Another.\nname: test\n"


def kernel(op: str, variant: str, median_us: float | None, axes: dict[str, Any], **more: Any) -> Row:
    """A timing at a point named after its sizes; None is one that was not measured."""
    timed = median_us is not None
    samples = [median_us * factor for factor in (0.9, 1.0, 1.0, 1.2)] if median_us is not None else None
    point = ",".join(f"{name}={value}" for name, value in axes.items())
    figures: dict[str, Any] = {
        "bytes_moved": 8_000, "flops": 2_000, "config": None, "median_us": median_us, "iqr_us": 0.1 if timed else None,
        "min_us": samples and min(samples), "max_us": samples and max(samples), "samples_us": samples,
        "timer": "perf_counter" if timed else None, "speed_reason": None if timed else "interpreted: not measured",
        "roofline_fraction": None, "roofline_bound": None, "roofline_reason": "no roofline is known for a CPU",
    }  # fmt: skip
    about = {"op": op, "variant": variant, "arm": {op: variant}, "axes": axes, "point": point}
    return Row(stage="kernels", **{**COMMON, **about, "status": "ok", **figures, **more})


def check(op: str, variant: str, status: str = "ok", point: str = "decode", **more: Any) -> Row:
    figures: dict[str, Any] = {"point": point}
    if status != "unsupported":
        figures |= {"seed": 0}
    if status in ("ok", "wrong"):
        figures |= {"max_error_ratio": 0.25 if status == "ok" else 7.5, "rms_error_ratio": 0.5}
    if status in ("wrong", "failed"):
        figures |= {"replay": f"tk check --op {op}"}
    reason = None if status == "ok" else more.pop("reason", f"why it is {status}")
    about = {"op": op, "variant": variant, "arm": {op: variant}}
    return Row(stage="check", **{**COMMON, **about, "status": status, "reason": reason, **figures, **more})


def served(stage: Stage, tokens_per_s: float | None, workload: str, **more: Any) -> Any:
    """An arm's or a peer's answer to a workload."""
    timed = tokens_per_s is not None
    figures: dict[str, Any] = dict.fromkeys(COLUMNS[stage]["ok"])
    figures |= {"workload": workload, "requests": 4, "requests_failed": 0, "prompt_tokens": 64, "output_tokens": 100}
    figures |= {"speed_reason": None if timed else "swiglu interpreted on a CPU: not measured"}
    if tokens_per_s is not None:
        seconds = [100 / tokens_per_s * factor for factor in (0.9, 1.0, 1.1)]
        figures |= {"tokens_per_s": tokens_per_s, "tokens_per_s_iqr": tokens_per_s / 10, "seconds": seconds}
        figures |= dict.fromkeys(("ttft_s", "tpot_s", "gap_s"), QUANTILES)
    if stage == "engine":
        figures |= {"steps": 9, "preemptions": 0, "peak_running": 4, "peak_occupancy": 0.5, "last_page_waste": 0.1}
        figures |= {"hit_tokens": 8, "saved_bytes": 4096, "evicted_blocks": 1}
    return Row(stage=stage, **{**COMMON, "arm": {"swiglu": "torch"}, "status": "ok", **figures, **more})


def parity(arm: dict[str, str], equal: int, **more: Any) -> Row:
    divergence = None if equal == 4 else {"request": 2, "place": 5, "margin": 0.25}
    figures: dict[str, Any] = {
        "workload": "chat", "first_arm": {"swiglu": "torch"}, "tokens_equal": equal == 4, "requests_equal": equal,
        "requests": 4, "first_divergence": divergence, "logprob_drift": 1e-6,
    }  # fmt: skip
    return Row(stage="parity", **{**COMMON, "arm": arm, "status": "ok", **figures, **more})


def step(name: str, category: str, self_us: float, arm: dict[str, str], **more: Any) -> Row:
    """A range of 10 steps that took 10,000 us together."""
    figures: dict[str, Any] = {
        "workload": "chat", "range": name, "category": category, "clock": "host", "calls": 20, "total_us": self_us,
        "self_us": self_us, "steps": 10, "step_us": 10_000.0, "share": self_us / 10_000, "speed_reason": None,
    }  # fmt: skip
    return Row(stage="step", **{**COMMON, "arm": arm, "status": "ok", **figures, **more})


def everything() -> list[Row]:
    """A row of every kind."""
    torch, fused = {"swiglu": "torch"}, {"swiglu": "fused"}
    quantized: dict[str, Any] = dict.fromkeys(COLUMNS["quantization"]["ok"])
    quantized |= {"num_tokens": 1000, "window": 128, "nats": 3.2, "disk_bytes": 10, "speed_reason": "not measured"}
    return [
        check("swiglu", "torch"), check("swiglu", "fused"), check("swiglu", "crash", "failed", reason=EVIL),
        check("swiglu", "wrong", "wrong"), check("swiglu", "tma", "unsupported"),
        *(kernel("swiglu", "torch", 2.0 + rows, {"T": rows, "I": 8}) for rows in (1, 2, 4, 64)),
        *(kernel("swiglu", "fused", 1.5 + rows, {"T": rows, "I": 8}) for rows in (1, 2, 4, 64)),
        kernel("rms_norm", "torch", 5.0, {"T": 1, "H": 8}), kernel("rms_norm", "one_pass", 4.0, {"T": 1, "H": 8}),
        kernel("copy_pages", "torch", 5.0, {"P": 8}, flops=0), kernel("matmul", "tiled", None, {"T": 1}),
        served("engine", 1000.0, "chat"), served("engine", 1500.0, "chat", arm=fused),
        served("engine", None, EVIL, texts=[EVIL, "plain"]),
        Row(stage="engine", **COMMON, arm={"swiglu": "crash"}, status="failed", reason=EVIL, workload="chat"),
        parity(fused, 3),
        served("peers", 500.0, "chat", arm={}, peer="transformers_padded", peer_settings={"cache": "static"}),
        Row(stage="speedup", **COMMON, arm=torch, status="ok", workload="chat", peer="transformers_padded",
                   peer_settings={"cache": "static"}, speedup=2.0, speedup_iqr=0.1, speedups=[2.0, 1.9, 2.1],
                   speedup_of="median of replicates", requests=4, tokens_equal=True, requests_equal=4),
        *(step(*part, arm) for arm in (torch, fused) for part in (
            ("step", "step", 100.0), ("schedule", "phase", 900.0), ("layer 1", "layer", 500.0),
            ("swiglu.torch", "op", 6000.0), ("no range", "gap", 2500.0))),
        Row(stage="quantization", **COMMON, arm={}, status="ok",
                        **{**quantized, "method": "dense", "perplexity": 26.5, "memory_bytes": 2_000_000}),
        Row(stage="quantization", **COMMON, arm={}, status="ok",
            **{**quantized, "method": "rtn", "bits": 4, "group_size": 32, "perplexity": 27.0,
               "kl": 0.01, "top1_agreement": 0.9, "memory_bytes": 700_000}),
    ]  # fmt: skip


def record(folder: Path, rows: Sequence[Row], source: str = QUESTION, **more: Any) -> Path:
    """The folder of a run with these rows."""
    import json

    lines = [json.loads(row.as_json()) for row in rows]
    resolved = {
        "name": "test",
        "shapes": {"swiglu": [{"T": 1}]},
        "workload": [{"name": EVIL, "prompts": [EVIL, "say"]}],
    }
    write_run(folder, lines, resolved=more.pop("resolved", resolved), environment={**ENVIRONMENT, **more})
    (folder / "experiment.yaml").write_text(source)
    return folder
