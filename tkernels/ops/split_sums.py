"""Partial sums of a K that is split over programs, added up in the same launch by the program that comes last."""

import triton
import triton.language as tl


@triton.jit
def summed_by_the_last(sums, partial_ptrs, mask, arrived_ptr, split, splits, stride_partial_s):
    """Leaves this split's sums in the workspace; (whether it is the last to arrive, then the sum over all splits).

    sums, partial_ptrs (of split 0) and mask have one shape; arrived_ptr counts the splits of this tile. The splits are
    added in their order, whoever comes last, so the sum has the same bits on every run.
    """
    tl.store(partial_ptrs + split * stride_partial_s, sums, mask=mask)
    # One thread counts for all: the barrier puts the others' stores before its release, as the barrier by which the
    # count reaches the others puts their loads after its acquire.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived_ptr, 0)
        sums = tl.load(partial_ptrs, mask=mask, other=0.0)
        for other in range(1, splits):
            sums += tl.load(partial_ptrs + other * stride_partial_s, mask=mask, other=0.0)
    return is_last, sums


def words_per_split(words: int, block: int, tiles: int, programs: int, most: int) -> int:
    """Word rows of K for one program, a multiple of `block`: as few as still give `programs` programs over all tiles.

    Never a function of the number of tokens: where the sums are cut decides how they round.
    """
    splits = min(max(programs // tiles, 1), most)
    return triton.cdiv(triton.cdiv(words, splits), block) * block
