"""What nobody may read must not matter: with another poison in its place, the results have the same bits.

Outputs, workspace, tails, unused pages and padding hold NaN (integers: the largest) in the first call, and a finite
number (integers: 0, a valid index) in the second. NaN finds what is added or compared; what is multiplied by zero or
masked by a minimum, which NaN passes or which hides it, the finite one finds.
"""

import torch

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs, poison, replace_poison
from tkernels.variant import Variant
from tkernels.verification.calls import bits, call, finite_poison
from tkernels.verification.sanitizers.base import Sanitizer


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    one = call(variant, clone_inputs(case.inputs), config, fill=poison)
    two = call(variant, replace_poison(case.inputs, finite_poison), config, fill=finite_poison)
    for name, result in one.items():
        # An element that the op leaves untouched holds its poison in both.
        value = finite_poison(result.dtype)
        second = torch.tensor(value, dtype=result.dtype, device=result.device).float()  # rounded as it was stored
        untouched = result.float().isnan() & (two[name].float() == second)
        differ = (bits(result) != bits(two[name])) & ~untouched
        if differ.any():
            index = tuple(differ.nonzero()[0].tolist())
            return (
                f"{name}{list(index)} is {float(result[index]):.9g} where nobody may read NaN, and "
                f"{float(two[name][index]):.9g} where that is {float(second):.9g}"
            )
    return None


SANITIZER = Sanitizer("poison", "results that depend on memory which nobody may read", _run, interpreted=False)
