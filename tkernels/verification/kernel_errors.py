"""What a call of a variant raised, in words for its author: what, at which lines and expressions, and what helps.

Triton's interpreter wraps what goes wrong in a program into an error that has no place; the tracebacks that it chains
have: the last frame that is neither Triton's nor ours is the kernel's, or a helper's that the kernel calls.
"""

import linecache
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from types import CodeType, TracebackType

import triton.language as tl
from triton.runtime.errors import InterpreterError

from tkernels import launch
from tkernels.names import suggest_name
from tkernels.verification.sites import FOREIGN, HOST, LAUNCH, LAUNCHER

_PYTHON = sysconfig.get_path("stdlib")
_SHOWN = 160  # characters of an expression

_OF_KERNELS = {
    r"int32 overflow": "widen what is multiplied before it is: .to(tl.int64) on the program id, page or row number",
    r"outside every argument": "every lane past the end needs its mask=; check mask, stride and the size of the block",
    r"arange's arguments must be of type tl.constexpr": "annotate the parameter, as in BLOCK: tl.constexpr",
    r"power of 2": "triton.next_power_of_2(n) in the launcher, and a mask= for the lanes past n",
    r"incompatible dimensions|[Cc]annot broadcast|could not be broadcast": (
        "blocks of one shape are wanted: [:, None] and [None, :] add dims of 1, which fit any size"
    ),
    r"pointer<.*(float|fp|bf)\d+$|triton.language.float\d+ and pointer": (
        "an offset is an integer: // where it is /, or .to(tl.int64)"
    ),
    r"must be Tensor, not tensor": "torch's functions take torch's tensors; a kernel has those of tl",
    r"0-dimensional arrays|only length-1 arrays|must be real number, not tensor": (
        "Python's float, int and math take one number; a block has the functions of tl"
    ),
    r"'torch\.dtype' object": "a kernel's dtypes are tl's, as tl.float32, or a pointer's own: out_ptr.dtype.element_ty",
    r"Unsupported ptr type": "tl.load and tl.store begin with a pointer, as in x_ptr + offs",
    r"Value argument cannot be block type": "one address for a whole block: add the block's offsets to the pointer",
    r"cannot convert None": "an argument may be None where a constexpr flag, as HAS_BIAS, keeps the kernel from it",
    r"equal reduction dimensions": "tl.dot multiplies [M, K] by [K, N]; tl.trans turns one",
    r"must be same dtype": "tl.dot takes operands of one dtype: .to() on one of them",
    r"missing \d+ required positional argument.*dtype": "tl.zeros and tl.full take a shape and a dtype",
    r"'int' object is not iterable": "a block has no numbered elements; [:, None] and [None, :] add dims",
    r"axis \d+ out of bounds": "a block's first axis is 0",
    r"invoked with a 0- or 1-dimensional": "[:, None] and [None, :] turn a block of one dim",
    r"is not defined": "a kernel sees its parameters, and constants of its file that are tl.constexpr",
}
"""A pattern of what is raised in a kernel -> what helps."""

_OF_LAUNCHERS = {
    r"missing \d+ required positional argument": "run.launch gives every parameter of the kernel by name",
    r"'int' object is not iterable": "a grid is a tuple, as in (tokens,)",
    r"'float' object cannot be interpreted as an integer": "a grid's sizes are whole numbers: // or triton.cdiv",
    r"Multiple assignments are not supported": "Triton takes one name for each =",
}


def describe_error(error: BaseException) -> str:
    """What was raised, and where: its line and expression, then each caller's; with a hint where one is known."""
    chain = list(raised_from(error))
    root = chain[-1]
    text = str(root)
    what = text if isinstance(root, AssertionError) and text else f"{type(root).__name__}: {text}"
    in_kernel, lines = _places(chain)
    places = [f"{'called from' if index else 'at'} {line}" for index, line in enumerate(reversed(lines))]
    hint = _hint(what, in_kernel, lines)
    return "\n  ".join([what, *places, *([f"hint: {hint}"] if hint else [])])


def raised_from(error: BaseException) -> Iterator[BaseException]:
    """The error; where that is the interpreter's, then what it was raised from, one for each function."""
    yield error
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
        yield error


def _places(chain: list[BaseException]) -> tuple[bool, list[str]]:
    """Whether a kernel raised it, and the places in the author's source, outermost first."""
    host: list[str] = []
    kernel: list[str] = []
    in_kernel = False
    for error in chain:
        for trace in _tracebacks(error):
            code = trace.tb_frame.f_code
            if code is LAUNCHER:
                host.clear()
            elif code is LAUNCH:
                in_kernel = True
            elif not _is_foreign(code.co_filename, FOREIGN if in_kernel else (*HOST, launch.__file__)):
                (kernel if in_kernel else host).append(_place(code, trace))
    return bool(kernel), kernel or host


def _is_foreign(file: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in these folders or Python's own."""
    return file.startswith(folders) or (file.startswith(_PYTHON) and "site-packages" not in file)


def _tracebacks(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _place(code: CodeType, trace: TracebackType) -> str:
    """ "file:line in function: expression"."""
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}: {_expression(code, trace)}"


def _expression(code: CodeType, trace: TracebackType) -> str:
    """The part of the source that the frame was evaluating."""
    lines = linecache.getlines(code.co_filename)
    place = next(islice(code.co_positions(), trace.tb_lasti // 2, None))
    begin, end, left, right = place
    if begin is None or end is None or left is None or right is None or end > len(lines):
        text = linecache.getline(code.co_filename, trace.tb_lineno)
    else:
        # The interpreter compiles a kernel anew, from its source without the indentation of its first line.
        indented = lines[code.co_firstlineno - 1] if code.co_firstlineno <= len(lines) else ""
        shift = len(indented) - len(indented.lstrip()) if indented.lstrip().startswith("def ") else 0
        chosen = [line.encode() for line in lines[begin - 1 : end]]
        shift = shift if chosen[0][left : left + 1].isspace() or left < shift else 0
        chosen[-1] = chosen[-1][: right + shift]
        chosen[0] = chosen[0][left + shift :]
        text = b"".join(chosen).decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _hint(what: str, in_kernel: bool, lines: list[str]) -> str:
    """What helps; "" where nothing is known."""
    if unknown := re.search(r"module 'triton\.language' has no attribute '(\w+)'", what):
        near = suggest_name(unknown[1], [name for name in dir(tl) if not name.startswith("_")])
        return f"tl has no {unknown[1]}{near}"
    if "KeyError" in what and lines and "run.workspace" in lines[-1]:
        return "a buffer of the workspace is declared by the variant's workspace="
    if "outside every argument" in what and lines and "mask" not in lines[-1].partition(": ")[2]:
        return "it has no mask=: lanes past the end need one"
    known = _OF_KERNELS if in_kernel else _OF_LAUNCHERS
    return next((hint for pattern, hint in known.items() if re.search(pattern, what)), "")
