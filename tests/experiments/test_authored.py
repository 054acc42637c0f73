"""Variants that authors wrote from `tk new`, in `tests/tkernels/authored`: checked, timed and served like any other."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tkernels import OPS
from tkernels.measurement import INTERPRETED, prepare_supported
from tkernels.variant import UnsupportedError
from tkernels.verification.check import check_case
from tkernels.verification.draws import drawn_cases, wide_cases
from tsched import LLM, SamplingParams

AUTHORED = Path(__file__).parents[1] / "tkernels" / "authored"
AUTHORS = OPS.with_variants_from(AUTHORED)
W4 = AUTHORS["dequant_gemm"].variants["gptq_order"]


def test_a_kernel_that_reads_words_as_gptqs_files_hold_them_is_checked() -> None:
    cases = [*drawn_cases(W4, 2, fixed={"M": 2}), *wide_cases(W4, fixed={"bits": 4, "M": 1})]
    assert {case.axes["order"] for case, _ in cases} == {"sequential"}
    assert len(cases) >= 4
    assert {check_case(W4, case, config, offsets=False).status for case, config in cases} == {"ok"}


def test_an_attention_kernel_of_another_tile_order_is_checked() -> None:
    variant = AUTHORS["paged_decode"].variants["newest_first"]
    held = {"N": 9, "S": 8, "lengths": "full", "B": 1}
    assert [check_case(variant, *one).status for one in drawn_cases(variant, 3, fixed=held)] == ["ok"] * 3


def test_the_w4_kernel_has_a_point_to_be_timed_at_and_what_has_none_says_why() -> None:
    one = ["--op", "dequant_gemm", "--variant", "gptq_order", "--variants-from", str(AUTHORED)]
    done = CliRunner().invoke(app, ["bench", *one, "--json"])
    rows = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("not measured", INTERPRETED),  # of a point that a GPU would time
        ("unsupported", "it takes uniform codes of 4 bits"),
    ]
    assert rows[0]["axes"]["order"] == "sequential"
    assert rows[0]["prepare_us"] is None


@pytest.mark.parametrize("name", ["gptq_order", "tiled"])
def test_a_point_has_the_weight_as_it_is_loaded_and_each_variant_makes_its_own_of_it(name: str) -> None:
    variant = AUTHORS["dequant_gemm"].variants[name]
    sizes = {"M": 1, "N": 8, "K": 64, "group_size": 32, "bits": 4, "coding": "uniform", "permuted": False}
    axes = variant.contract.draw_axes(lambda _, some: some[0], {**sizes, "sparse": False})
    ready = prepare_supported(variant, variant.contract.case(axes, 0))
    assert axes["order"] == "sequential"
    assert ready.case.inputs["weight"].order == ("sequential" if name == "gptq_order" else "interleaved")
    asked = {**axes, "order": "interleaved"}
    if name == "gptq_order":
        with pytest.raises(UnsupportedError, match="it reads words as checkpoints have them"):
            prepare_supported(variant, variant.contract.case(asked, 0))


def test_the_w4_kernel_is_served(tmp_path: Path) -> None:
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    quantized, _ = write_models(tmp_path, Kind("gptq", 4, 32), **narrow, head_dim=32)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    tokens = []
    for choice in ("torch", "gptq_order"):
        llm = LLM(quantized, dtype=torch.float32, device="cpu", kernels={"dequant_gemm": choice}, ops=AUTHORS)
        assert llm.arm["dequant_gemm"] == choice
        tokens.append([output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [8]], params)])
    assert tokens[0] == tokens[1]
