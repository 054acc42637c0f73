"""Building blocks for `make_inputs`: seeded values, and tensors laid out in storage that is poisoned where nobody
may read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

KINDS = ("ordinary", "huge", "tiny")
ROW_KINDS = (*KINDS, "faint", "outlier")
"""What else norms and activations of rows are put to: rows whose mean square is nothing beside an epsilon, every other
one 0 of either sign; an eighth of a row's elements at most thousands of times as large as the others.
"""
LAYOUTS = ("contiguous", "padded")

_READ = 1 << 20  # indices, of which an op has a few for each token

# Of |x|: large enough that a lost upcast overflows or loses everything, small enough that fp16 results stay finite.
_SCALE = {"ordinary": 1.0, "huge": 128.0, "tiny": 2.0**-10, "faint": 2.0**-16, "outlier": 1.0}
_OUTLIER = 2.0**12


def dtype_of(name: Any) -> torch.dtype:
    """torch.float16 from "float16"."""
    dtype = getattr(torch, str(name))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" from torch.float16."""
    return str(dtype).removeprefix("torch.")


def on_grid(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded, in place, to multiples of 2**-8, so that fp32 sums of up to 256 of their products are exact in
    any order.

    Where few elements are judged, the order of summation would otherwise decide their rms error, by luck. Products that
    fall to tf32 do not show in such values: see `Draws.product_operands`.
    """
    return values.mul_(256).round_().div_(256)


_EPSILONS = (1e-6, 1e-5)

MOST_DRAWN = 4_194_301
"""Beyond this many, a tensor's values repeat: one core draws a normal number in 30 to 40 ns, and the 80 million of a
benchmark's point in 3 s. A prime, so that no two rows of common widths are alike."""


class Draws:
    """Seeded random tensors; the same seed gives the same values on every machine and device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self._seed = seed

    @cached_property
    def many_normal(self) -> torch.Tensor:
        """float32 [MOST_DRAWN], on the device: for tensors of gigabytes, each from another place of it."""
        return torch.randn(MOST_DRAWN, generator=self.generator).to(self.device)

    def epsilon(self) -> float:
        """What a norm adds to a mean square: one seed has the one that models have, the next the other."""
        return _EPSILONS[self._seed % 2]

    def integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        """int64 in [low, high], both included, on the CPU; for a meta device, more than what is read while drawing are
        not drawn: a weight's codes, where lengths and slots are.
        """
        if self.device.type == "meta" and math.prod(shape) > _READ:
            return torch.empty(tuple(shape), dtype=torch.int64, device=self.device)
        return fill(torch.randint(low, high + 1, _few(shape), generator=self.generator), shape)

    def permutation(self, n: int) -> torch.Tensor:
        """int64 [n] on the CPU."""
        return torch.randperm(n, generator=self.generator)

    def grid_normal(self, shape: Sequence[int], dtype: torch.dtype, kind: Any = "ordinary") -> torch.Tensor:
        """As `normal`, rounded to `on_grid`'s multiples, of which fp32 sums the products without error."""
        return (on_grid(self.normal(shape, torch.float64)) * _SCALE[kind]).to(dtype)

    def product_operands(
        self, tokens: int, outputs: int, inputs: int, kind: Any = "ordinary"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, inputs] of the kind's scale and weight [outputs, inputs], float64, for `x @ weight.t()`.

        One order of summation in fp32 may have half the error of another, which would say nothing about a kernel. So
        every product is a multiple of 2**-16 (times the scales), and fp32 sums a thousand of them without error. Of
        each product one factor is a multiple of 2**-13, the other of 2**-3, by turns: either has more digits than bf16
        and tf32. Outputs are of x's size whatever `inputs` is; a power of two keeps the grid.
        """
        turns = torch.arange(inputs, device=self.device) % 2 == 0
        steps = torch.where(turns, 2.0**13, 2.0**3).double()
        x, weight = (self.normal(shape, torch.float64) for shape in ((tokens, inputs), (outputs, inputs)))
        x.mul_(steps).round_().div_(steps).mul_(_SCALE[str(kind)])
        steps = 2.0**16 / steps
        weight.mul_(steps).round_().div_(steps).mul_(2.0 ** -round(math.log2(inputs) / 2))
        return x, weight

    def normal(self, shape: Sequence[int], dtype: torch.dtype, kind: Any = "ordinary") -> torch.Tensor:
        """Normal values of the kind's scale, rounded to `dtype`, contiguous; on a meta device none are drawn."""
        if self.device.type == "meta":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        values = fill(torch.randn(_few(shape), generator=self.generator, dtype=torch.float64), shape, self.device)
        values = values * _SCALE[str(kind)]
        if kind == "faint":
            values[1::2] *= 0  # of either sign
        elif kind == "outlier":
            # Not one alone, whose own rounding would be all that an rms error sees: luck.
            place = self.integers(0, shape[-1] - 1, (*shape[:-1], max(1, shape[-1] // 8))).to(values.device)
            values.scatter_(-1, place, torch.sign(values.gather(-1, place)) * _OUTLIER)
        return values.to(dtype).to(self.device)

    def laid_out(self, values: torch.Tensor, layout: Any = "contiguous", padding: int = 3) -> torch.Tensor:
        """The same values, in storage that has NaN (or the top integer) beyond and, if "padded", between its rows; if
        "head_major", values [T, heads, ...] lie head by head.
        """
        if layout == "contiguous":
            return poisoned_views([values], dim=0)[0]
        if layout == "head_major":
            return poisoned_views([values.transpose(0, 1)], dim=0)[0].transpose(0, 1)
        if layout == "padded":
            gap = torch.full_like(values[..., :1], poison(values.dtype)).repeat_interleave(padding, dim=-1)
            return poisoned_views([values, gap], dim=-1)[0]
        raise ValueError(f"layout {layout!r}: there is {', '.join(LAYOUTS)}, head_major")


def _few(shape: Sequence[int]) -> tuple[int, ...]:
    """How many values are drawn for a tensor of this shape: all, in its shape, or as many as do not take seconds."""
    return tuple(shape) if math.prod(shape) <= MOST_DRAWN else (MOST_DRAWN,)


def fill(few: torch.Tensor, shape: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """The first of the values in this shape; where they are fewer than it holds, again and again, on `device`."""
    count = math.prod(shape)
    if few.numel() < count:
        few = few.to(device if device is not None else few.device).repeat(-(-count // few.numel()))
    return few.flatten()[:count].view(tuple(shape))


def poison(dtype: torch.dtype) -> float | int:
    """What no kernel may read: NaN, or the largest integer (an index far outside everything)."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def poisoned_views(parts: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """The parts side by side along `dim` in one allocation, as views of it; 16 poisoned elements follow the last.

    q, k and v [T, H, D] side by side along -2 are the views of a fused QKV row that the engine passes.
    """
    first = parts[0]
    dim = dim % first.dim()
    sizes = [part.shape[dim] for part in parts]
    shape = [sum(sizes) if d == dim else n for d, n in enumerate(first.shape)]
    count = 1
    for n in shape:
        count *= n
    storage = torch.full((count + 16,), poison(first.dtype), dtype=first.dtype, device=first.device)
    whole = storage[:count].view(shape)
    views = list(whole.split(sizes, dim=dim))
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return views


def map_tensors(inputs: Mapping[str, Any], function: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """`function` of every tensor among the inputs, those inside a weight (which has `map_tensors` itself) and under a
    tensor descriptor included.
    """

    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, TensorDescriptor):
            return replace(value, base=function(value.base))
        return value.map_tensors(function) if hasattr(value, "map_tensors") else value

    return {name: mapped(value) for name, value in inputs.items()}


def tensors_in(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """All tensors that `map_tensors` meets, in its order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(inputs, note)
    return found


def whole_storage(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All that a tensor's storage holds, [n] of a dtype: what lies between and beyond its elements too."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def clone_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors with the same strides, offsets and poison around them; views of one storage stay so."""
    storages: dict[int, torch.Tensor] = {}

    def clone(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages or storage.nbytes() == 0:
            storages[storage.data_ptr()] = whole_storage(value, torch.uint8).clone()
        typed = whole_storage(storages[storage.data_ptr()], value.dtype)
        return typed.as_strided(value.shape, value.stride(), value.storage_offset())

    return map_tensors(inputs, clone)


def _map_storages(inputs: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Clones of the inputs; `change` maps the elements [n] of each whole storage, floats widened, to new ones."""
    copies = clone_inputs(inputs)
    seen: set[int] = set()

    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            whole = whole_storage(tensor, tensor.dtype)
            whole.copy_(change(whole).to(tensor.dtype))
        return tensor

    return map_tensors(copies, in_place)


def replace_poison(inputs: Mapping[str, Any], fill: Callable[[torch.dtype], float | int]) -> dict[str, Any]:
    """Clones of the inputs with `fill` of the dtype wherever there is `poison`: between, beyond and inside tensors."""

    def change(whole: torch.Tensor) -> torch.Tensor:
        if whole.is_floating_point():
            wide = whole.double()
            return wide.masked_fill(wide.isnan(), fill(whole.dtype))
        return whole.masked_fill(whole == poison(whole.dtype), fill(whole.dtype))

    return _map_storages(inputs, change)


def roughen_floats(inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Clones of the inputs whose floats have all their digits: each times its own factor from 1 to 1.25.

    Drawn values may lie on a grid on which fp32 sums are exact in any order; the bits of these show the order.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(whole: torch.Tensor) -> torch.Tensor:
        if not whole.is_floating_point():
            return whole
        factors = 1 + torch.rand(whole.shape, generator=generator, dtype=torch.float64) / 4
        rough = whole.double() * factors.to(whole.device)
        # fp8 has no infinity: what its largest value became would be NaN.
        return rough.clamp(-448.0, 448.0) if whole.dtype == torch.float8_e4m3fn else rough

    return _map_storages(inputs, change)


def widen_floats(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The already rounded inputs in float64: what the oracle computes on.

    fp8 stays fp8: nothing computes in it, so a definition converts what it reads and says how it rounds what it writes.
    """

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.clone()

    return map_tensors(inputs, wide)


def outside_views(tensors: Mapping[str, Any], names: Sequence[str]) -> dict[int, torch.Tensor]:
    """The bytes of each storage that none of the named tensors covers: storage address -> masked copy."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(tensors)}
    result = {address: whole_storage(one, torch.uint8).clone() for address, one in storages.items()}
    for name in names:
        value = tensors[name]
        typed = whole_storage(result[value.untyped_storage().data_ptr()], value.dtype)
        typed.as_strided(value.shape, value.stride(), value.storage_offset()).zero_()
    return result
