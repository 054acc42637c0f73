"""A variant that keeps weights in a layout of its own is checked with what its `prepare` makes of a checkpoint's."""

from pathlib import Path

import pytest

from tkernels import OPS
from tkernels.measurement import prepare_supported
from tkernels.outside import broken_files
from tkernels.variant import Variant
from tkernels.verification.check import check_case, drawn_results
from tkernels.verification.draws import drawn_cases
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

AUTHORED = (Path(__file__).parent / "authored" / "dequant_gemm" / "gptq_order.py").read_text()
PREPARE = '''def turned(weight: QuantizedWeight) -> QuantizedWeight:
    """The codes of each word from its other end."""
    if weight.bits != 4:
        return weight
    fields = [((weight.packed >> (4 * field)) & 0xF) << (28 - 4 * field) for field in range(8)]
    return replace(weight, packed=sum(fields[1:], fields[0]))


def supports('''
TURNED = [
    ("def supports(", PREPARE),
    ("import torch\n", "from dataclasses import replace\n\nimport torch\n"),
    ("    supports=supports,\n", "    supports=supports,\n    prepare=turned,\n"),
    ("packed >> (4 * field)) & 0xF).to(", "packed >> (28 - 4 * field)) & 0xF).to("),
]
HELD = {"M": 2, "bits": 4, "coding": "uniform", "permuted": False, "sparse": False}


def write(folder: Path, source: str, *changes: tuple[str, str]) -> Path:
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (folder / "dequant_gemm").mkdir()
    (folder / "dequant_gemm" / "own.py").write_text(
        source.replace("dequant_gemm_gptq_order", "dequant_gemm_own").replace("dequant_gemm_tiled", "dequant_gemm_own")
    )
    return folder


def load(folder: Path) -> Variant:
    return OPS.with_variants_from(folder)["dequant_gemm"].variants["own"]


def test_a_right_layout_is_right_wherever_it_is_checked(tmp_path: Path) -> None:
    variant = load(write(tmp_path, AUTHORED, *TURNED))
    results = list(drawn_results(variant, 4, fixed=HELD))
    assert [str(result) for result in results if result.status != "ok"] == []
    assert {result.axes["order"] for result in results} == {"sequential"}
    findings = [list(sanitized(SANITIZERS[name], variant, 2, fixed=HELD)) for name in ("reuse", "poison", "race")]
    assert all(findings)
    assert [str(one) for found in findings for one in found if one is not None] == []
    (case, config), *_ = drawn_cases(variant, 1, fixed=HELD)
    ready = prepare_supported(variant, variant.contract.case(case.axes, 7))  # as it is timed
    assert ready.microseconds is not None
    assert check_case(ready.variant, ready.case, config).status == "ok"


def test_a_weight_in_a_form_that_no_checkpoint_has_is_not_prepared(tmp_path: Path) -> None:
    variant = load(write(tmp_path, AUTHORED, *TURNED))
    (case, config), *_ = drawn_cases(variant, 1, fixed=HELD)
    result = check_case(variant, variant.contract.case({**case.axes, "order": "interleaved"}, 0), config)
    assert (result.status, result.reason) == (
        "unsupported",
        "prepare gets weights as checkpoints have them: order=sequential",
    )


TILED = OPS["dequant_gemm"].variants["tiled"].file.read_text()


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (AUTHORED, [*TURNED[:3]]),  # the kernel reads the words as they were
        (AUTHORED, [*TURNED, ("fields[0]))", "fields[0]).flip(0))")]),
        (
            TILED,
            [
                (
                    "    prepare=interleaved,\n",
                    "    prepare=lambda w: interleaved(w.__class__(**{**vars(w), 'packed': w.packed.flip(0)})),\n",
                )
            ],
        ),
    ],
    ids=["not read so", "rows turned too", "rows turned before the usual form"],
)
def test_a_layout_that_the_kernel_does_not_read_is_wrong(
    source: str, changes: list[tuple[str, str]], tmp_path: Path
) -> None:
    variant = load(write(tmp_path, source, *changes))
    assert "wrong" in {result.status for result in drawn_results(variant, 6, fixed={**HELD, "K": 64})}


def test_a_prepare_that_returns_another_type_is_a_fault_of_the_file(tmp_path: Path) -> None:
    changed = ("    return replace(weight, packed=sum(fields[1:], fields[0]))\n", "    return fields\n")
    folder = write(tmp_path, AUTHORED, *TURNED[:3])
    file = folder / "dequant_gemm" / "own.py"
    file.write_text(file.read_text().replace(*changed))
    (fault,) = broken_files([folder]).values()
    line = file.read_text().split("def turned")[0].count("\n") + 1
    assert f"own.py:{line}: prepare returns what the op does not take" in fault
    assert "argument 'weight' must be a QuantizedWeight, got list" in fault
