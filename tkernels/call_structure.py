"""What a call looks like to a contract and to a launcher: all of its arguments but the values that tensors hold."""

from collections.abc import Mapping
from typing import Any

import torch

_STRIDED = torch.strided
_ON_THE_HOST = (int, float, torch.dtype, type(None))


def read_structure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], with_places: bool
) -> tuple[tuple[Any, ...] | None, list[int]]:
    """What calls that pass the same checks, and are launched alike but for addresses, have in common; the addresses.

    Args:
        args, kwargs: Of the call.
        with_places: Whether it counts which tensors share memory, and where in it they are: an op that writes an
            argument asks.

    Returns:
        The structure, hashable; None where an argument is no strided tensor, number or dtype, and no weight that says
        what its `structure` and its `tensors` are. And the address of each tensor, a weight's among them, in order.
    """
    # Flat, because a tuple of tuples takes twice as long to make and to hash. What begins an argument's part says how
    # long that is: a size, or a class.
    parts: list[Any] = [*kwargs]
    addresses: list[int] = []
    origins: dict[int, tuple[int, int]] = {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.layout is not _STRIDED:
                return None, addresses
            address = value.data_ptr()
            addresses.append(address)
            parts += (value.shape, value.stride(), value.dtype, value.device, address % 16)
            if with_places:
                storage = address - int(value.storage_offset()) * value.element_size()
                number, origin = origins.setdefault(storage, (len(origins), address))
                parts += (number, address - origin)
        elif isinstance(value, _ON_THE_HOST):
            parts += (value.__class__, value or repr(value))  # the class, for 1 == 1.0 == True; repr, for 0.0 == -0.0
        elif (structure := getattr(value, "structure", None)) is not None:
            parts += (value.__class__, structure)
            addresses += [tensor.data_ptr() for tensor in value.tensors]
        else:
            return None, addresses
    return tuple(parts), addresses


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call that has a structure, in the order of the addresses."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _ON_THE_HOST):
            found += value.tensors
    return found
