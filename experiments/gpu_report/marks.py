"""What the kernels are to reach on an H200, and what was published of the peers: the yardsticks of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tkernels.contract import Value

Against = Literal["read", "copy", "matmul", "peer", "time"]

Place = tuple[str, str]
"""An op and the name of a point."""


@dataclass(frozen=True)
class Mark:
    """One figure that the project is judged by.

    against: "read", "copy" and "matmul" are shares of the bandwidth, or of the rate of a large matrix product, measured
        on the same card; "peer" is how many times as fast as the fastest of `peers`, of which one may be a plainer
        variant of the project's own; "time" is microseconds.
    ideal: a ratio that no kernel can exceed, where the contract's roofline does not say so already.
    axes: the point, where no realistic point of the contract has its name.
    over: the point that the peers are timed at, where it is another one.
    plus: an op whose time at the point of the same name is added.
    """

    op: str
    point: str
    against: Against
    target: float
    peers: tuple[str, ...] = ()
    ideal: float | None = None
    axes: Mapping[str, Value] = field(default_factory=dict)
    over: str = ""
    plus: str = ""

    @property
    def places(self) -> list[Place]:
        """Where something has to be timed: its own, and others that it is judged by."""
        others = [(self.op, self.over)] * bool(self.over) + [(self.plus, self.point)] * bool(self.plus)
        return [(self.op, self.point), *others]

    @property
    def peers_place(self) -> Place:
        """Where its peers are timed."""
        return self.op, self.over or self.point

    @property
    def text(self) -> str:
        if self.against == "peer":
            return f">= {self.target:g}x {' or '.join(self.peers)}" + (f" at {self.over}" if self.over else "")
        if self.against == "time":
            return f"<= {self.target:g} us" + (f", {self.plus}'s included" if self.plus else "")
        if self.against == "matmul":
            return f">= {self.target:.0%} of the matmul rate"
        return f">= {self.target:.0%} of {self.against} bandwidth"


_DECODE = ("flashinfer", "sdpa_flash", "sdpa_cudnn")
_PREFILL = ("sdpa_flash", "sdpa_cudnn", "torch")
_NORM = ("liger", "flashinfer", "torch")
_MIXTURE = ("torch_grouped_mm", "vllm", "triton_kernels")


def _quantized(rows: int, target: float, ideal: float) -> tuple[Mark, Mark]:
    point, axes = f"M={rows},N=8192,K=8192,g=128", {"M": rows, "N": 8192, "K": 8192}
    return (
        Mark("dequant_gemm", point, "peer", target, ("cublas_16bit",), ideal, axes),
        Mark("dequant_gemm", point, "peer", 1.0, ("gemlite",), None, axes),
    )


def _mixture(tokens: int, against: Against, target: float) -> tuple[Mark, Mark]:
    point = f"T={tokens},Qwen3-30B-A3B"
    return (
        Mark("moe_mlp", point, against, target, _MIXTURE),
        Mark("moe_mlp", point, "peer", 1.0, ("torch_grouped_mm",)),
    )


_DENSE_MIXTURE = "T=1,Qwen3-30B-A3B"
_DENSE_OVER_CODES = 16 / (4 + 16 / 128)  # bits a weight, of codes with a scale for each group of 128

MARKS: tuple[Mark, ...] = (
    Mark("paged_decode", "B=64,context=8192", "read", 0.90, _DECODE),
    Mark("paged_decode", "B=64,context=1024", "read", 0.75, _DECODE),
    Mark("paged_decode", "B=1,context=65536", "read", 0.80, _DECODE),
    Mark("paged_prefill", "B=8,chunk=512,context=512", "peer", 1.0, _PREFILL),
    Mark("paged_prefill", "B=1,chunk=4096,context=4096", "peer", 1.0, _PREFILL),
    Mark("paged_prefill", "B=1,chunk=512,context=16384", "peer", 1.0, _PREFILL),
    Mark("paged_prefill", "B=1,chunk=16384,context=16384", "peer", 1.0, _PREFILL),
    Mark("qk_norm_rope_scatter", "T=4096,Hq=32,Hkv=8,D=128", "copy", 0.85, ("torch",)),
    Mark("rms_norm", "T=4096,H=2560", "copy", 0.90, _NORM),
    Mark("add_rms_norm", "T=4096,H=2560", "copy", 0.90, _NORM),
    Mark("swiglu", "T=4096,I=9728", "copy", 0.90, _NORM),
    *_quantized(1, 3.0, 3.85),
    *_quantized(16, 3.0, 3.85),
    *_quantized(64, 2.0, 2.86),
    *_quantized(128, 1.2, 1.43),
    Mark("block_scaled_matmul", "M=64,N=19456,K=2560", "peer", 1.4, ("cublas_16bit",), 2.0),
    Mark("block_scaled_matmul", "M=2048,N=19456,K=2560", "peer", 1.4, ("cublas_16bit",), 2.0),
    Mark("sample", "B=256,V=151936,top_p", "time", 60, ("torch",), axes={"B": 256, "V": 151936, "asks": "top_p"}),
    Mark("cascade_decode", "B=32,prefix=4096,own=256", "peer", 1.5, ("unshared",)),
    *_mixture(1, "read", 0.70),
    *_mixture(8, "read", 0.70),
    *_mixture(64, "read", 0.80),
    *_mixture(4096, "matmul", 0.50),
    *_mixture(32768, "matmul", 0.60),
    Mark("moe_mlp", f"{_DENSE_MIXTURE},W4", "peer", 2.5, ("gemv_per_pair",), _DENSE_OVER_CODES, over=_DENSE_MIXTURE),
    Mark("route", "T=1,K=8,E=128", "time", 10, ("torch",), plus="sort_by_expert"),
    Mark("route", "T=256,K=8,E=128", "time", 10, ("torch",), plus="sort_by_expert"),
)


@dataclass(frozen=True)
class Published:
    """What others measured of a peer: a share of the data sheet's bandwidth, or times as fast as another variant."""

    op: str
    peer: str
    point: str
    value: float
    over: str | None
    source: str


PUBLISHED: tuple[Published, ...] = (
    Published("paged_decode", "flashinfer", "B=64,context=1024", 0.60, None, "FlashInfer, H100"),
    Published("paged_decode", "flashinfer", "B=64,context=8192", 0.89, None, "FlashInfer, H100"),
    Published("paged_decode", "flashinfer", "B=1,context=65536", 0.59, None, "FlashInfer, H100"),
    Published("add_rms_norm", "liger", "T=4096,H=2560", 0.87, None, "Liger-Kernel, H100"),
    Published("dequant_gemm", "gemlite", "M=1,N=8192,K=8192,g=128", 1.78, "cublas_16bit", "GemLite, H100"),
    Published("dequant_gemm", "gemlite", "M=16,N=8192,K=8192,g=128", 1.29, "cublas_16bit", "GemLite, H100"),
    Published("dequant_gemm", "gemlite", "M=64,N=8192,K=8192,g=128", 0.73, "cublas_16bit", "GemLite, H100"),
    Published("dequant_gemm", "gemlite", "M=128,N=8192,K=8192,g=128", 0.54, "cublas_16bit", "GemLite, H100"),
)

FAR_UNDER = 0.7
"""A peer below this share of its published figure was not run as its authors run it: its row is void."""
