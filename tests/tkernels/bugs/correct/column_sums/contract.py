"""column_sums: the sum of all rows, as the gradient of a norm's weight needs it."""

from tkernels.contract import Case, Choice, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import LAYOUTS, Draws, dtype_of


def reference(x):
    """out[h] = sum over t of x[t, h].

    Args:
        x: [T, H], any float dtype, free row stride.

    Returns:
        out [H], as x.
    """
    return x.sum(dim=0)


def make_inputs(axes, seed, device):
    draws = Draws(seed, device)
    x = draws.grid_normal((int(axes["T"]), int(axes["H"])), dtype_of(axes["activation"]))
    return {"x": draws.laid_out(x, axes["layout"])}


def bytes_moved(case: Case) -> int:
    x = case.inputs["x"]
    return (x.numel() + x.shape[1]) * x.element_size()


CONTRACT = Contract(
    name="column_sums",
    reference=reference,
    baseline=reference,
    axes=(
        Int("T", 1, 2**31 - 1, (1, 2, 5, 7), "rows", wide=(40,)),
        Int("H", 1, 65536, (1, 31, 64, 100), "columns", wide=(1000,)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS),
    ),
    arguments={"x": Tensor("T H", "activation")},
    outputs={"out": Output("H", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=lambda case: int(case.inputs["x"].numel()),
    default="torch",
)
