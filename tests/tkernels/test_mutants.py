"""The tests bite: each kernel with one fault planted in it must fail its check. Any survivor is a hole in the tests."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from triton.runtime.errors import InterpreterError

import tkernels
from tkernels.check import check_case, drawn_cases
from tkernels.mutation import Mutant, mutants
from tkernels.registry import Names, Op, Registry
from tkernels.sanitizers.overflow import check_offsets
from tkernels.variant import Variant

TRITON = [
    (op.name, v.name) for op in tkernels.OPS.values() for v in op.variants.values() if v.kind == "triton" and v.kernels
]
DRAWS = 60
OFFSET_DRAWS = 12
SECONDS = 300

# A mutant that computes the same: (op, variant) -> {the expression before: the proof}. Each is also shown to survive.
EQUIVALENT: dict[tuple[str, str], dict[str, str]] = {
    ("paged_decode", "split_kv"): {
        "split < used": "the split after the last has no keys: its loop is empty, and what it stores is never read",
    },
    ("paged_prefill", "packed_gqa"): {
        "first_row < queries * GROUP": "a tile that begins where its sequence ends has no rows: every store is masked",
    },
}


class TimeIsUp(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load(op: str, variant: str, source: str, folder: Path) -> Variant:
    """The mutant in place of the variant: joined as an outside file of the same name."""
    (folder / op).mkdir(parents=True, exist_ok=True)
    (folder / op / f"{variant}.py").write_text(source)
    known = tkernels.OPS[op]
    rest = {name: v for name, v in known.variants.items() if name != variant}
    rest[known.contract.default] = known.variants[known.contract.default]
    rest.pop(variant, None)
    registry = Registry({op: Op(known.contract, Names("variant", rest))})
    return registry.with_variants_from(folder)[op].variants[variant]


def killed_by(mutant: Variant, original: Variant) -> str | None:
    """What noticed the fault: a wrong result, an error, int32 overflow on faked strides, or time; None if nothing
    did.
    """
    try:
        with time_limit(SECONDS):
            for case, config in drawn_cases(original, DRAWS, seed=1):
                result = check_case(mutant, case, config)
                if result.status != "ok":
                    return f"{result.status}: {result.reason or 'error rule'}"
            # Faked strides need sizes of 3 and more in every dim, so these draws may have more programs.
            for case, config in drawn_cases(original, OFFSET_DRAWS, seed=1, max_programs=64):
                assert config is not None
                try:
                    check_offsets(mutant, case, config)
                except InterpreterError as error:
                    return f"offsets: {error}"
    except TimeIsUp:
        return "time"
    return None


def survivors(op: str, variant: str, kinds: tuple[str, ...], folder: Path) -> tuple[int, list[Mutant]]:
    original = tkernels.OPS[op].variants[variant]
    found = list(mutants(original.file.read_text(), kinds))
    proofs = EQUIVALENT.get((op, variant), {})
    alive = []
    for index, mutant in enumerate(found):
        loaded = load(op, variant, mutant.source, folder / str(index))
        verdict = killed_by(loaded, original)
        if mutant.before in proofs:
            assert verdict is None, f"{mutant.name} is listed as equivalent, but was killed: {verdict}"
        elif verdict is None:
            alive.append(mutant)
    return len(found), alive


@pytest.mark.parametrize(("op", "variant"), TRITON)
def test_the_unchanged_kernel_survives(op: str, variant: str, tmp_path: Path) -> None:
    original = tkernels.OPS[op].variants[variant]
    assert killed_by(load(op, variant, original.file.read_text(), tmp_path), original) is None


@pytest.mark.parametrize(("op", "variant"), TRITON)
def test_removing_any_mask_is_caught(op: str, variant: str, tmp_path: Path) -> None:
    count, alive = survivors(op, variant, ("mask_removed",), tmp_path)
    assert count > 0, "no mask found: is the kernel's file read rightly?"
    assert not alive, "survived:\n" + "\n".join(m.name for m in alive)


@pytest.mark.parametrize(
    "kind", ["stride_swapped", "off_by_one", "scale_dropped", "zero_point_dropped", "int64_removed"]
)
@pytest.mark.parametrize(("op", "variant"), TRITON)
def test_planted_fault_is_caught(op: str, variant: str, kind: str, tmp_path: Path) -> None:
    _, alive = survivors(op, variant, (kind,), tmp_path)
    assert not alive, "survived:\n" + "\n".join(m.name for m in alive)


def test_every_kind_of_fault_is_planted_somewhere() -> None:
    sources = [v.file.read_text() for op in tkernels.OPS.values() for v in op.variants.values() if v.kind == "triton"]
    planted = {mutant.kind for source in sources for mutant in mutants(source)}
    assert planted == {
        "mask_removed", "stride_swapped", "off_by_one", "scale_dropped", "zero_point_dropped", "int64_removed"
    }  # fmt: skip
