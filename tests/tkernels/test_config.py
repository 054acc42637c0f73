"""A config's launch options: what is allowed, who can launch with them, and how they reach Triton."""

import re
from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import write_variant
from tests.tkernels.stub_driver import compiling, jit_function
from tkernels import OPS, Config
from tkernels.device import TARGETS
from tkernels.launch import Kernel, launch_options
from tkernels.tuning import NEAREST
from tkernels.variant import UnsupportedError, VariantError
from tkernels.verification.ahead_of_time import compile_for


def test_an_option_that_is_not_set_says_nothing_and_older_entries_read() -> None:
    plain, full = Config(BLOCK=4), Config(BLOCK=4, maxnreg=96, launch_pdl=1)
    assert plain.as_dict() == {"BLOCK": 4, "num_warps": 4, "num_stages": 2}
    assert full.as_dict() == {**plain.as_dict(), "maxnreg": 96, "launch_pdl": 1}
    for config in (plain, full):
        assert Config.of(config.as_dict()) == config
    assert plain != full
    assert hash(plain) != hash(full)
    assert plain.pinned({"maxnreg": 96, "launch_pdl": 1}) == full
    assert full.pinned({"maxnreg": 0, "launch_pdl": 0}) == plain
    assert list(full) == ["BLOCK"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"maxnreg": 256}, "maxnreg must be at most 255, got 256"),
        ({"maxnreg": -1}, "maxnreg must be an integer of at least 0, got -1"),
        ({"launch_pdl": 2}, "launch_pdl must be at most 1, got 2"),
        ({"launch_pdl": True}, "launch_pdl must be an integer of at least 0, got True"),
        ({"num_stages": 0}, "num_stages must be an integer of at least 1, got 0"),
    ],
)
def test_a_value_that_an_option_may_not_have_is_refused(option: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**option)


@pytest.mark.parametrize(
    ("config", "arch", "reason"),
    [
        (Config(maxnreg=128), "sm_80", None),
        (Config(maxnreg=128), "gfx942", "maxnreg is an option of NVIDIA's compiler; this is gfx942"),
        (Config(maxnreg=128, num_warps=32), "sm_90", "32 warps of 128 registers a thread are more than a block's"),
        (Config(launch_pdl=1), "sm_90", None),
        (Config(launch_pdl=1), "sm_120", None),
        (Config(launch_pdl=1), "interpreter", None),
        (Config(launch_pdl=1), "sm_89", "of sm_90 and newer; this is sm_89"),
        (Config(launch_pdl=1), "gfx942", "of sm_90 and newer; this is gfx942"),
    ],
)
def test_who_can_launch_with_an_option(config: Config, arch: str, reason: str | None) -> None:
    unmet = config.unmet_on(arch)
    assert (unmet is None) if reason is None else (unmet is not None and reason in unmet)


def test_every_default_can_be_launched_where_it_is_the_default() -> None:
    for op in OPS.values():
        for variant in op.variants.values():
            for arch in TARGETS if variant.launch is not None else ():
                assert variant.default_config(arch).unmet_on(arch) is None, f"{op.name}.{variant.name} on {arch}"


def test_options_reach_tritons_compiler_and_not_its_interpreter() -> None:
    config = Config(num_warps=8, maxnreg=96, launch_pdl=1)
    assert launch_options(config) == {"num_warps": 8, "num_stages": 2}
    x, weight = torch.ones(2, 64), torch.ones(64)
    variant = OPS["rms_norm"].variants["row_per_program"]
    kernel = Kernel(variant, NEAREST, {"maxnreg": 96, "launch_pdl": 1})
    assert torch.equal(kernel(x, weight, 0.0), x)
    with compiling() as stub:
        kernel(x, weight, 1e-6)
        assert launch_options(config) == {"num_warps": 8, "num_stages": 2, "maxnreg": 96, "launch_pdl": True}
        (jit,) = (jit_function(one) for one in variant.kernels.values())
        ((key, _),) = jit.device_caches[0][0].items()
    assert "'maxnreg': 96, 'launch_pdl': True" in key
    assert stub.started is not None
    assert len(stub.started) == 1


def test_a_pin_that_the_device_cannot_meet_is_refused_by_name() -> None:
    kernel = Kernel(OPS["rms_norm"].variants["row_per_program"], NEAREST, {"maxnreg": 255, "num_warps": 32})
    with pytest.raises(
        UnsupportedError, match=r"rms_norm.row_per_program: .*'maxnreg': 255.*more than a block's 65536"
    ):
        kernel(torch.ones(2, 64), torch.ones(64), 1e-6)


def test_an_early_launch_is_only_for_kernels_that_wait(tmp_path: Path) -> None:
    for name in ("row_per_program", "rows_per_program"):
        assert OPS["add_rms_norm"].variants[name].waits_for_earlier_launches
    variant = OPS["swiglu"].variants["grid_stride"]
    with pytest.raises(ValueError, match="launch_pdl is for kernels that call tkernels.language.wait_for_earlier"):
        variant.pinned(variant.default[""], {"launch_pdl": 1})
    early = ("configs=(Config(), Config(num_warps=8))", "configs=(Config(), Config(launch_pdl=1))")
    with pytest.raises(VariantError, match="launch_pdl is for kernels that call"):
        OPS.with_variants_from(write_variant(tmp_path, early))
    waiting = (
        ("from tkernels import Config, Run, Variant", WAITING),
        ("    mask = offs < width\n", "    mask = offs < width\n    wait_for_earlier_launches()\n"),
    )
    made = OPS.with_variants_from(write_variant(tmp_path, early, *waiting))["swiglu"].variants["doubled"]
    assert made.waits_for_earlier_launches


WAITING = "from tkernels import Config, Run, Variant\nfrom tkernels.language import wait_for_earlier_launches"


@pytest.mark.slow
def test_a_kernel_reads_nothing_but_weights_and_writes_nothing_before_it_has_waited(tmp_path: Path) -> None:
    """By its instructions: the weight's loads, the wait, the next launch's leave, the tokens' loads, the stores."""
    waiting = [
        f"{op.name}.{variant.name}"
        for op in OPS.values()
        for variant in op.variants.values()
        if variant.launch is not None and variant.waits_for_earlier_launches
    ]
    rows = compile_for(["sm_80", "sm_90", "gfx942"], waiting, dump=tmp_path)
    assert {row.status for row in rows} <= {"ok", "unsupported"}
    compiled = [row for row in rows if row.status == "ok"]
    assert {f"{row.op}.{row.variant}" for row in compiled if row.arch == "sm_90"} == {*waiting}
    for row in compiled:
        stem = f"{row.op}.{row.variant}.{row.point}.{row.launch}.{row.arch}"
        if row.arch != "sm_90":
            (text,) = (one.read_text() for one in tmp_path.glob(f"{stem}.*") if one.suffix in (".ptx", ".amdgcn"))
            assert "griddepcontrol" not in text
            continue
        found = re.findall(r"\b(LDG|STG|LDGSTS|ATOMG|ACQBULK|PREEXIT)\b", (tmp_path / f"{stem}.sass").read_text())
        before, after = found[: found.index("ACQBULK")], found[found.index("ACQBULK") + 1 :]
        assert set(before) == ({"LDG"} if row.op in ("rms_norm", "add_rms_norm") else set()), row.name
        assert after[0] == "PREEXIT"
        assert sum(one in ("LDG", "LDGSTS") for one in after) >= max(len(before), 1)
        assert "STG" in after
