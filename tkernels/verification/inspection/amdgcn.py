"""AMD machine code, as LLVM's assembler text."""

import re

from tkernels.verification.inspection.accesses import Code, Instruction

_INSTRUCTION = re.compile(r"^\s+([a-z]\w+)\b(.*)")
_LABEL = re.compile(r"^(\.LBB\w+):")
_TARGET = re.compile(r"(\.LBB\w+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"(?:[^"]*/)?([^"/]+)"')
_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_ACCESS = re.compile(r"^(?:global|buffer|flat)_(load|store)_(?:lds_)?(dwordx[234]|dword|[us]?short|[us]?byte)")
_MATRIX = re.compile(r"^(v_s?mfmac?)_")
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_FIELD = re.compile(r"^\s+\.(\w+):\s+(\d+)\s*$", re.MULTILINE)


def parse(text: str) -> Code:
    """The instructions of the only kernel in the text."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files: dict[str, str] = {}
    line = ""
    for row in text.splitlines():
        if found := _LABEL.match(row):
            labels[found.group(1)] = len(instructions)
        elif found := _FILE.match(row):
            files[found.group(1)] = found.group(2)
        elif found := _LINE.match(row):
            line = f"{files.get(found.group(1), '')}:{found.group(2)}"
        elif found := _INSTRUCTION.match(row):
            instructions.append(_instruction(found.group(1), found.group(2), line))
    return Code(instructions, labels)


def _instruction(opcode: str, operands: str, line: str) -> Instruction:
    target = _TARGET.search(operands) if "branch" in opcode else None
    access = _ACCESS.match(opcode)
    width = 0
    if access:
        width = _BYTES.get(access.group(2)) or (2 if "short" in access.group(2) else 1)
    stores = access is not None and access.group(1) == "store"
    return Instruction(
        opcode,
        line,
        target.group(1) if target else "",
        loads=0 if stores else width,
        stores=width if stores else 0,
        matrix="MFMA" if _MATRIX.match(opcode) else "",
    )


def metadata(text: str) -> dict[str, int]:
    """The numbers that the assembler text ends with: vgpr_count, vgpr_spill_count, private_segment_fixed_size, ..."""
    return {name: int(value) for name, value in _FIELD.findall(text)}
