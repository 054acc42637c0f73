"""Whether this process interprets its Triton kernels or compiles them, decided once, when tkernels is imported.

Triton reads TRITON_INTERPRET at decoration time, also for its own library functions, so the choice has to be made
before the first `import triton` and holds for the life of the process. Without CUDA it is the interpreter; with CUDA,
the compiler. Where Triton's own variable is already set, or something imported Triton first, that decided, and
tkernels only reports what it finds.
"""

import os
import sys
from typing import Literal

import torch

Mode = Literal["interpret", "compile"]


def _decide() -> tuple[Mode, bool]:
    """The mode, and whether Triton had been imported before tkernels."""
    imported_first = "triton" in sys.modules
    if not imported_first and "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return ("interpret" if isinstance(tl.cdiv, InterpretedFunction) else "compile"), imported_first


MODE, _TRITON_WAS_FIRST = _decide()


def unavailable_reason(device: torch.device) -> str | None:
    """Why Triton variants cannot run on `device` in this process, or None where they can."""
    if device.type == "meta":
        return None if MODE == "compile" else "this process interprets; meta tensors compile in a process of their own"
    if MODE == "compile" and device.type != "cuda":
        if _TRITON_WAS_FIRST:
            return (
                "Triton was imported before tkernels and compiles in this process; "
                f"import tkernels first to interpret on {device.type}"
            )
        return (
            f"this process compiles for CUDA and cannot interpret on {device.type}; set TRITON_INTERPRET=1 to interpret"
        )
    if MODE == "interpret" and device.type == "cuda":
        return "this process interprets, because TRITON_INTERPRET was set; CUDA needs a process that compiles"
    return None
