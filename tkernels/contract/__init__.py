"""What is true of every variant of an op: its axes, its arguments and outputs, and its definition.

An op's `contract.py` builds one `Contract` of these.
"""

from tkernels.contract.arguments import Argument, ContractError, DType, Output, Scalar, Tensor, bind_axis, is_aligned
from tkernels.contract.axes import FLOATS, Axes, Axis, Choice, Choose, Constraint, Int, Value, dtype_axis
from tkernels.contract.definition import Case, Contract, pack, unpack

__all__ = [
    "FLOATS",
    "Argument",
    "Axes",
    "Axis",
    "Case",
    "Choice",
    "Choose",
    "Constraint",
    "Contract",
    "ContractError",
    "DType",
    "Int",
    "Output",
    "Scalar",
    "Tensor",
    "Value",
    "bind_axis",
    "dtype_axis",
    "is_aligned",
    "pack",
    "unpack",
]
