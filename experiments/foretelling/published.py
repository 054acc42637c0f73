"""The model beside published figures of others' kernels: the residuals that say how far it is to be believed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.foretelling.points import predict_by_name
from experiments.gpu_report.marks import PUBLISHED, Published
from tkernels.prediction.foretell import Foretold
from tkernels.prediction.gpus import Gpu, find_gpu
from tkernels.prediction.kept import CompiledFacts
from tkernels.prediction.model import BANDWIDTH, LAUNCH_US
from tkernels.registry import Registry

STAND_INS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys((("paged_decode", "flashinfer"), ("paged_decode", "tilelang")), "last_arriver"),
    ("paged_prefill", "triton"): "packed_gqa",
    ("add_rms_norm", "liger"): "row_per_program",
    ("moe_mlp", "liger moe"): "persistent",
    **dict.fromkeys((("dequant_gemm", "gemlite"), ("dequant_gemm", "marlin")), "auto"),
}
"""(op, peer) -> this project's variant of the same kind, which the model is asked for: the peers' code is not here."""

_MARLIN = {1: 2.20, 16: 2.21, 64: 1.48, 128: 1.05}

_FLASH, _H100 = (378 + 477) / 2 * 1e12, find_gpu("H100").peaks.flops_per_s["bfloat16"]

FURTHER: tuple[tuple[Published, str], ...] = (
    (Published("paged_decode", "tilelang", "B=32,context=4096", 0.83, None, "TileLang, H200"), "H200"),
    (
        Published(
            "paged_prefill", "triton", "B=1,chunk=16384,context=16384", _FLASH / _H100, None,
            "Triton beside FlashAttention-3: 378 to 477 TFLOP/s, whose middle this is, H100",
        ),
        "H100",
    ),
    (
        Published(
            "moe_mlp", "liger moe", "T=32768,Qwen3-30B-A3B", 523e12 / _H100, None,
            "Liger-Kernel#1294: Triton's fused MoE at 523 TFLOP/s, H100",
        ),
        "H100",
    ),
    *(
        (Published("dequant_gemm", "marlin", f"M={rows},N=8192,K=8192,g=128", value, "cublas_16bit", "Marlin"), "H100")
        for rows, value in _MARLIN.items()
    ),
)  # fmt: skip
"""Published figures that no peer of a GPU report is judged by, each with its GPU."""


@dataclass(frozen=True)
class Residual:
    """A published figure, and the model's of the variant that stands for what it was measured of, in the same unit."""

    op: str
    point: str
    peer: str
    variant: str
    gpu: str
    published: float
    predicted: float | None
    unit: str
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over published: above 1 the model is faster than the peer was measured."""
        return None if self.predicted is None else self.predicted / self.published


def residuals(
    ops: Registry, rows_of: Callable[[str], Sequence[CompiledFacts]], only_op: str | None = None
) -> list[Residual]:
    """Every published figure with the model's, or those of one op. rows_of: architecture -> rows of the kept table."""
    every = [*((one, "H100") for one in PUBLISHED), *FURTHER]
    shown = [(one, find_gpu(name)) for one, name in every if only_op in (None, one.op)]
    found = {}
    for gpu in {gpu.name: gpu for _, gpu in shown}.values():
        wanted = [(one.op, STAND_INS[one.op, one.peer], one.point) for one, its in shown if its == gpu]
        found[gpu.name] = predict_by_name(ops, wanted, gpu, rows_of(gpu.facts.arch))
    return [_residual(one, found[gpu.name], gpu) for one, gpu in shown]


def _residual(one: Published, found: Mapping[tuple[str, str, str], Foretold], gpu: Gpu) -> Residual:
    variant = STAND_INS[one.op, one.peer]
    foretold = found.get((one.op, variant, one.point), Foretold(reason="no such variant or point"))
    unit = "share of the data sheet's limit" if one.over is None else f"times as fast as {one.over}"
    predicted = None
    if foretold.us is not None:
        if one.over is None:
            predicted = (foretold.limit_us or 0.0) / foretold.us
        else:
            predicted = _dense_us(one.point, gpu) / foretold.us
    return Residual(one.op, one.point, one.peer, variant, gpu.name, one.value, predicted, unit, foretold.reason)


def _dense_us(point: str, gpu: Gpu) -> float:
    """Of the same product with a weight of 16 bits, which up to 128 rows is a read of that weight."""
    sizes = {name: int(value) for name, value in (part.split("=") for part in point.split(",")) if value.isdigit()}
    rows, outputs, inputs = (sizes[name] for name in ("M", "N", "K"))
    moved = 2 * (outputs * inputs + rows * (outputs + inputs))
    return LAUNCH_US + moved / (gpu.peaks.memory_bytes_per_s * BANDWIDTH) * 1e6
