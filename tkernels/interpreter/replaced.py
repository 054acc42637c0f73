"""The interpreter computing otherwise for a while: other methods of its builder, checked integers, exact products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from tkernels.interpreter.number_formats import as_float, precision_name
from tkernels.matrix_units import multiply


@contextmanager
def replaced_methods(**methods: Callable[..., Any]) -> Iterator[None]:
    """Gives the interpreter's builder other methods for a while. Contexts nest: each restores what it found."""
    builder = triton_interpreter.interpreter_builder
    before = {name: vars(builder).get(name) for name in methods}
    vars(builder).update(methods)  # an instance's attribute shadows its class's method
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(builder, name)
            else:
                setattr(builder, name, method)


@contextmanager
def overflow_checks() -> Iterator[None]:
    """Makes integer +, - and * raise where an int32 result does not fit, as a GPU's debug build would."""
    builder = triton_interpreter.interpreter_builder
    before = builder.options
    builder.options = triton_interpreter.InterpreterOptions(debug=True, sanitize_overflow=True)
    try:
        yield
    finally:
        builder.options = before


@contextmanager
def exact_products() -> Iterator[None]:
    """Makes `tl.dot` sum its products in fp64 and round once, so that where a row lies in its tile changes no bit.

    numpy's fp32 product treats the last rows of a tile differently from the first (seen: the last bit), which no matrix
    unit does.
    """

    def exact_dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        product = multiply(as_float(a), as_float(b), precision_name(input_precision), np.float64)
        return triton_interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with replaced_methods(create_dot=exact_dot):
        yield
