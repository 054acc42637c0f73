"""What presets are called, where they are made, and that what a package offers is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import tmodel
import tmodel.formats
import tmodel.quantizers
from tests.tmodel.moe_against_dense import DENSE, EXPERTS, count_parameters
from tmodel import PRESETS, RANDOM_PRESETS, ConfigError, Recipe, find_model, presets
from tmodel.model_names import preset_model
from tmodel.presets import cache_folder, preset_path


def test_the_cache_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "tkernels"
    for relative in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_folder() == tmp_path / "home" / ".cache" / "tkernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "tkernels"


def test_a_trained_preset_is_made_in_the_cache_from_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Recipe, int]] = []

    def make(recipe: Recipe, directory: Path, *, seed: int) -> None:
        made.append((recipe, seed))
        directory.mkdir()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(presets, "make_from_recipe", make)
    plan = find_model("tiny")
    assert (plan.name, plan.config.architecture.name, plan.random_weights) == ("tiny", "Qwen3ForCausalLM", 0)
    assert made == [], "a plan makes nothing"
    assert plan.directory() == plan.directory() == preset_path("tiny")
    assert plan.directory().parent == tmp_path / "tkernels"
    assert made == [(PRESETS["tiny"], 0)]


def test_tiny_moe_reads_a_token_with_as_many_weights_as_tiny_and_its_routers() -> None:
    assert replace(EXPERTS, config=DENSE.config) == DENSE
    (held, active, none), (held_by_experts, active_in_experts, in_routers) = map(count_parameters, (DENSE, EXPERTS))
    assert (held, active, none) == (525_056, 525_056, 0)
    assert in_routers == 2 * 8 * 128
    assert active_in_experts == active + in_routers
    assert held_by_experts == active_in_experts + 2 * 6 * 3 * 192 * 128  # by layer six idle experts of three matrices


def test_a_name_that_is_no_model_says_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="owner/name@revision; presets are tiny, .*; did you mean 'random:gpt2'"):
        find_model("gpt2")
    with pytest.raises(ConfigError, match="did you mean 'tiny-llama'"):
        find_model("tiny-lama")
    with pytest.raises(ConfigError, match="unknown model 'random:gtp2': there is .*; did you mean 'random:gpt2'"):
        find_model("random:gtp2")
    with pytest.raises(ConfigError, match="unknown preset 'gtp2': there is tiny, .*; did you mean 'gpt2'"):
        preset_model("gtp2")


def test_random_weights_have_the_name_of_their_preset() -> None:
    plan = find_model("random:gpt2")
    assert (plan.name, plan.random_weights) == ("gpt2", 124_439_808)
    assert "gpt2" in RANDOM_PRESETS


def test_a_name_that_the_file_system_does_not_take_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"model '/aaa.*aaa': File name too long"):
        find_model("/" + "a" * 5000)


@pytest.mark.parametrize("package", [tmodel, tmodel.formats, tmodel.quantizers])
def test_all_that_a_package_offers_is_there(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__) > 0
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
