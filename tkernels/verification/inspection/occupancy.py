"""How many blocks of a kernel a multiprocessor holds at once, from what a block needs and what there is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor (a CU on AMD) has, in total and in the units in which it is handed out.

    registers: 32-bit registers of a warp's lane, times the lanes, times the schedulers: all of them. register_unit:
    registers of a warp are handed out in multiples of this. schedulers: a warp's registers lie in one of them.
    shared_reserved: what the system takes of each block's shared memory. tensor_columns: of sm_100's tensor memory.
    """

    warp_size: int
    warps: int
    blocks: int
    registers: int
    register_unit: int
    schedulers: int
    shared_bytes: int
    shared_of_block: int
    shared_unit: int
    shared_reserved: int
    tensor_columns: int = 0


def _nvidia(warps: int, blocks: int, shared_kb: int, tensor_columns: int = 0) -> Limits:
    return Limits(
        warp_size=32,
        warps=warps,
        blocks=blocks,
        registers=65536,
        register_unit=256,
        schedulers=4,
        shared_bytes=shared_kb * 1024,
        shared_of_block=(shared_kb - 1) * 1024,
        shared_unit=128,
        shared_reserved=1024,
        tensor_columns=tensor_columns,
    )


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; units of allocation as in the
# Nsight Compute occupancy calculator. AMD: the CDNA3 ISA guide and LLVM's AMDGPU usage: 4 SIMDs of 512 VGPRs a lane
# (vector and accumulation registers together, in eights), 8 waves each; 16 work-groups of more than one wave.
LIMITS = {
    "sm_80": _nvidia(warps=64, blocks=32, shared_kb=164),
    "sm_86": _nvidia(warps=48, blocks=16, shared_kb=100),
    "sm_89": _nvidia(warps=48, blocks=24, shared_kb=100),
    "sm_90": _nvidia(warps=64, blocks=32, shared_kb=228),
    "sm_100": _nvidia(warps=64, blocks=32, shared_kb=228, tensor_columns=512),
    "sm_120": _nvidia(warps=48, blocks=24, shared_kb=100),
    "gfx942": Limits(
        warp_size=64,
        warps=32,
        blocks=16,
        registers=4 * 512 * 64,
        register_unit=8 * 64,
        schedulers=4,
        shared_bytes=65536,
        shared_of_block=65536,
        shared_unit=512,
        shared_reserved=0,
    ),
}


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def resident_blocks(limits: Limits, warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> int:
    """Blocks of `warps` warps that fit on a multiprocessor together; 0 where not even one does.

    The least of four quotients: warps and blocks; registers (a warp's, rounded up to the unit, in each scheduler's
    share); shared memory (rounded up, the system's part included); tensor memory.

    Args:
        registers: Of a thread.
        shared_bytes: Of a block.
        tensor_columns: Of a block.
    """
    of_warp = _up(registers * limits.warp_size, limits.register_unit)
    warps_by_registers = (
        limits.registers // limits.schedulers // of_warp * limits.schedulers if of_warp else limits.warps
    )
    shared = _up(shared_bytes + limits.shared_reserved, limits.shared_unit)
    fits = [limits.blocks, limits.warps // warps, warps_by_registers // warps]
    if shared:
        fits.append(limits.shared_bytes // shared if shared_bytes <= limits.shared_of_block else 0)
    if tensor_columns:
        fits.append(limits.tensor_columns // tensor_columns)
    return min(fits)


def occupancy(limits: Limits, warps: int, blocks: int) -> float:
    """Resident warps over the most that a multiprocessor holds, in [0, 1]."""
    return blocks * warps / limits.warps
