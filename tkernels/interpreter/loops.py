"""The loops of an interpreted kernel count in the types that its compiler would give them."""

import ast
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter


class TypedLoops(triton_interpreter.ASTTransformer):
    """Triton's rewriting of a kernel, in which Python's `range` is `typed_range` too, as `tl.range` is."""

    def visit_For(self, node: ast.For) -> ast.AST:
        match node.iter:
            case ast.Call(func=ast.Name(id="range") as name):
                name.id = typed_range.__name__
        return self.generic_visit(node)


def typed_range(first: Any, second: Any = None, step: Any = None, **options: Any) -> Iterator[Any]:
    """The values of a kernel's loop as its compiler has them: scalars of the type to which bounds and step promote.

    Triton's interpreter gives plain numbers. One that starts in int64 has to stay so, or what it is multiplied by
    overflows here alone; and two of int32 have to overflow here as they do there.
    """
    bounds = (0, first) if second is None else (first, second)
    ends = (*bounds, 1 if step is None else step)
    semantic = triton_interpreter.interpreter_semantic
    kind = functools.reduce(semantic.integer_promote_impl, (semantic.to_tensor(end).dtype for end in ends))
    dtype = triton_interpreter._get_np_dtype(kind)
    for value in triton_interpreter.interpreter_builder.loop_values(range(*ends)):
        yield tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=dtype), kind), kind)
