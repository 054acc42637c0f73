"""tkernels: ops whose variants are interchangeable Triton kernels. See `tkernels.OPS` and `tkernels.select`."""

from tkernels import mode as _mode  # first: it decides, before Triton is imported, whether this process interprets

if _mode.MODE == "interpret":
    from tkernels.interpreter.patches import install as _install

    _install()

from tkernels.config import Config
from tkernels.contract import (
    Axes,
    Case,
    Choice,
    Constraint,
    Contract,
    ContractError,
    DType,
    Int,
    Output,
    Scalar,
    Tensor,
)
from tkernels.device import DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.launch import Kernel, Run
from tkernels.lockfile import TuningError
from tkernels.names import UnknownNameError
from tkernels.preparation import PrepareReport, prepared
from tkernels.ranges import NVTX, NvtxRanges, Ranges
from tkernels.recording import Recording
from tkernels.registry import Registry, builtin_ops
from tkernels.selection import KernelSet, SelectionError, select
from tkernels.tuning import Tuning
from tkernels.variant import Op, UnsupportedError, Variant, VariantError
from tkernels.workspace import Buffer

OPS = builtin_ops()
"""The built-in ops: `OPS["paged_decode"].variants["split_kv"](q, k_cache, ...)`."""

__all__ = [
    "NVTX",
    "OPS",
    "Axes",
    "Buffer",
    "Case",
    "Choice",
    "Config",
    "Constraint",
    "Contract",
    "ContractError",
    "DType",
    "DeviceFacts",
    "Int",
    "Kernel",
    "KernelSet",
    "NvtxRanges",
    "Op",
    "Output",
    "PrepareReport",
    "Ranges",
    "Recording",
    "Registry",
    "Run",
    "Scalar",
    "SelectionError",
    "TKernelsError",
    "Tensor",
    "Tuning",
    "TuningError",
    "UnknownNameError",
    "UnsupportedError",
    "Variant",
    "VariantError",
    "builtin_ops",
    "prepared",
    "select",
]
