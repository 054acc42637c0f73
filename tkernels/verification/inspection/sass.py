"""NVIDIA machine code, as nvdisasm prints it."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tkernels.verification.inspection.accesses import Code, Instruction

# /*1240*/  @!P1 LDGSTS.E.BYPASS.128 [R10], desc[UR12][R38.64], P1 ;
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_[\w]+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_ACCESS = re.compile(r"^(LDG|LDGSTS|LD|STG|ST)\.")
_BULK = re.compile(r"^(UTMALDG|UTMASTG|UBLKCP)\b")
_MATRIX = re.compile(r"^([A-Z0-9]*MMA)\b")
_WAIT = "ACQBULK"  # griddepcontrol.wait
_PREFETCH = "CCTL.E.PF2"  # prefetch.global.L2
_WRITE = re.compile(r"(STG|ST|ATOMG?|REDG?|UTMASTG|UTMAREDG|UBLKRED)\b")
_WIDTH = re.compile(r"\.(?:(\d+)|[US](8|16))\b")


def disassemble(nvdisasm: Path, cubin: bytes) -> str:
    """The text of a cubin, with the source line of each instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Code and its lines alone, no data-flow analysis: a quarter less time.
        done = subprocess.run([nvdisasm, "-c", "-g", "-ndf", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def parse(text: str) -> Code:
    """The instructions of the only kernel in nvdisasm's text."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line, fresh = "", True
    for row in _text_section(text):
        if found := _LINE.match(row):
            if fresh:  # of inlined code, the callee comes first and its callers follow
                line, fresh = f"{found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}", False
        elif found := _LABEL.match(row):
            labels[found.group(1)] = len(instructions)
        elif found := _INSTRUCTION.match(row):
            instructions.append(_instruction(found.group(1), found.group(2), line))
            fresh = True
    return Code(instructions, labels)


def early_launch(code: Code) -> dict[str, int]:
    """How it is ready to begin before earlier launches have ended: {"waits": 1}, once it waits for them, and how many
    instructions before that one ask for lines of the L2 cache and write to memory, if any do; nothing of code that does
    not wait.
    """
    opcodes = [one.opcode for one in code.instructions]
    if _WAIT not in opcodes:
        return {}
    ahead = opcodes[: opcodes.index(_WAIT)]
    prefetches = sum(one.startswith(_PREFETCH) for one in ahead)
    writes = sum(_WRITE.match(one) is not None for one in ahead)
    counts = {"waits": opcodes.count(_WAIT), "prefetches": prefetches, "writes": writes}
    return {name: count for name, count in counts.items() if count}


def _text_section(text: str) -> Iterator[str]:
    inside = False
    for row in text.splitlines():
        if row.lstrip().startswith(".section\t"):
            inside = ".text." in row
        elif inside:
            yield row


def _instruction(opcode: str, operands: str, line: str) -> Instruction:
    target = _TARGET.search(operands)
    access, matrix = _ACCESS.match(opcode), _MATRIX.match(opcode)
    width = _width(opcode) if access else 0
    stores = access is not None and access.group(1) in ("STG", "ST")
    return Instruction(
        opcode,
        line,
        target.group(1) if target else "",
        loads=0 if stores else width,
        stores=width if stores else 0,
        bulk=_BULK.match(opcode) is not None,
        matrix=matrix.group(1) if matrix else "",
    )


def _width(opcode: str) -> int:
    """Bytes: 4 unless the opcode says .U8, .S16, .64, .128 or .256."""
    widths = [int(bits or small) // 8 for bits, small in _WIDTH.findall(opcode)]
    return max(widths, default=4)
