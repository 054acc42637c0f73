"""What other projects' 4-bit kernels take of the weights that there are."""

from tkernels.contract import Axes


def only_plain(axes: Axes) -> str | None:
    """Why a peer that reads nothing but 4-bit codes, each input at its own place, cannot take this weight."""
    if axes.get("bits", 4) != 4 or axes.get("coding", "uniform") != "uniform":
        return f"it reads uniform codes of 4 bits, not {axes.get('coding', 'uniform')} ones of {axes.get('bits', 4)}"
    for kind in ("permuted", "sparse"):
        if axes.get(kind, False):
            return f"it reads no {kind} weight"
    return None
