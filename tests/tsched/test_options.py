"""The record of engine options: what it refuses, and that everything which offers options reads it."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.schema import SchedulerOptions
from tsched import LLM, AsyncLLM
from tsched.options import OPTIONS, SCHEDULER_OPTIONS, EngineOptions, Option, OptionError, read_options
from tsched.resolved_options import CacheUnits, UnitSizes, resolve_options, split_bytes
from tsched.scheduling.scheduler import Scheduler

NUMBERS = {"ge": lambda end: end - 1, "gt": lambda end: end, "le": lambda end: end + 1, "lt": lambda end: end}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.builds(object),
    st.sampled_from([torch.int8, torch.device("meta"), np.float32(0.5), int]),
)


def wrong_values(one: Option) -> st.SearchStrategy[Any]:
    """Values of another type than the option's, and numbers outside its range."""
    kinds: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,), object: ()}
    allowed = kinds[one.kind]

    def is_wrong(value: Any) -> bool:
        if value is None:
            return not one.is_optional
        if one.kind is object:  # none of what is drawn is a mapping, a registry or the like
            is_empty_list = one.name == "architectures_from" and isinstance(value, list) and not value
            return not isinstance(value, str) and not is_empty_list
        if isinstance(value, bool):
            return one.kind is not bool
        return not isinstance(value, allowed)

    outside = [st.just(NUMBERS[name](end)) for name, end in one.bounds.items()]
    outside += [st.text(max_size=8).filter(lambda text: text not in one.choices)] if one.choices else []
    outside += [st.sampled_from([float("nan"), float("inf"), 10**400])] if one.kind is float else []
    return st.one_of(ANYTHING.filter(is_wrong), *outside)


def named(one: Option) -> str:
    return one.name


@pytest.mark.parametrize("one", OPTIONS.values(), ids=named)
def test_every_wrong_type_and_range_is_a_value_error_that_says_what_is_allowed(one: Option) -> None:
    @given(wrong_values(one))
    def check(value: Any) -> None:
        for make in (
            lambda: EngineOptions(**{one.name: value}),
            lambda: LLM("nowhere", **{one.name: value}),
            lambda: AsyncLLM("nowhere", **{one.name: value}),
        ):
            with pytest.raises(OptionError) as caught:
                make()
            assert caught.value.option == one.name
            assert str(caught.value).startswith(f"{one.name} must be {one.allowed}, got {value!r}")

    check()


@pytest.mark.parametrize("one", [one for one in OPTIONS.values() if one.bounds], ids=named)
def test_the_ends_of_every_range_are_allowed(one: Option) -> None:
    step = 1 if one.kind is int else 1e-9
    ends = {"ge": 0, "gt": step, "le": 0, "lt": -step}
    for name, end in one.bounds.items():
        value = one.kind(end + ends[name])
        if one.power_of_two and name == "lt":
            value = (value + 1) // 2
        assert getattr(EngineOptions(**{one.name: value}), one.name) == value


@pytest.mark.parametrize("one", [one for one in OPTIONS.values() if one.choices], ids=named)
def test_every_word_is_allowed_and_the_nearest_is_named(one: Option) -> None:
    for word in one.choices:
        assert getattr(EngineOptions(**{one.name: word}), one.name) == word
        with pytest.raises(OptionError, match=f"got '{word}x'; did you mean '{word}'?"):
            EngineOptions(**{one.name: f"{word}x"})


def test_a_block_is_a_power_of_two() -> None:
    for size in (3, 12, 24):
        with pytest.raises(OptionError, match=f"^block_size must be .* that is a power of two, got {size}$"):
            EngineOptions(block_size=size)


def test_values_have_one_spelling() -> None:
    options = EngineOptions(
        max_num_seqs=np.int64(4), decode_share=0, dtype=torch.float16, device=torch.device("cuda", 1)
    )
    assert (options.max_num_seqs, options.decode_share, options.dtype, options.device) == (4, 0.0, "float16", "cuda:1")
    assert type(options.max_num_seqs) is int
    assert type(options.decode_share) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 3  # type: ignore[misc]


def test_bytes_and_a_fraction_are_one_thing() -> None:
    with pytest.raises(OptionError, match="two ways to say one thing"):
        EngineOptions(kv_cache_bytes=10**6, kv_cache_fraction=0.5)


@pytest.mark.parametrize("make", [LLM, AsyncLLM, lambda model, **options: read_options(options)])
def test_an_unknown_option_is_refused_with_the_nearest(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="no option 'blok_size': there is kernels, .*; did you mean 'block_size'"):
        make("nowhere", blok_size=16)
    with pytest.raises(TypeError, match="no option 'zzz': there is kernels, dtype,"):
        make("nowhere", zzz=16)


@pytest.mark.parametrize("serve", [LLM, AsyncLLM])
def test_the_signature_and_its_help_are_the_records(serve: type) -> None:
    model, *others = inspect.signature(serve).parameters.values()
    assert model.name == "model"
    assert {one.name: one.default for one in others} == dataclasses.asdict(EngineOptions())
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in others)
    listed = inspect.getdoc(serve.__init__) or ""
    for one in OPTIONS.values():
        assert f"    {one.name}: {one.meaning}; {one.usual} by default. It is {one.allowed}" in listed.splitlines()


def test_a_field_added_to_the_record_is_an_option_of_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else lists the options: in a copy of the record's file, one more field is all that it takes."""
    source = Path(inspect.getfile(EngineOptions)).read_text()
    field = '    seats: Annotated[int, Option("most seats", unit="seats", ge=3)] = 7\n\n    def __post_init__'
    program = (
        "import importlib.util, inspect, sys\n"
        f"source = {source.replace('    def __post_init__', field, 1)!r}\n"
        "module = type(sys)('tsched.options'); sys.modules['tsched.options'] = module\n"
        "exec(compile(source, 'tsched/options.py', 'exec'), vars(module))\n"
        "from tsched import LLM\n"
        "print(inspect.signature(LLM).parameters['seats'])\n"
        "print('seats: most seats; 7 by default. It is an integer of at least 3' in LLM.__init__.__doc__)\n"
        "try: LLM('nowhere', seats=2)\n"
        "except ValueError as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "seats: int = 7", "True", "seats must be an integer of at least 3, got 2",
    ]  # fmt: skip


def test_the_record_loads_no_torch() -> None:
    program = "import sys, tsched.options; print({'torch', 'triton', 'tkernels', 'tmodel'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_section_scheduler_of_a_yaml_is_the_records() -> None:
    assert list(SchedulerOptions.model_fields) == list(SCHEDULER_OPTIONS)
    assert all(one.section == "scheduler" for one in SCHEDULER_OPTIONS.values())
    assert {name for name in OPTIONS if name not in SCHEDULER_OPTIONS} == {
        "kernels", "dtype", "device", "tuning", "seed", "ops", "ranges", "architectures_from",
    }  # fmt: skip


@pytest.mark.parametrize("one", SCHEDULER_OPTIONS.values(), ids=named)
def test_every_wrong_type_and_range_in_a_yaml_is_refused_at_its_key(one: Option) -> None:
    @given(wrong_values(one).filter(lambda value: type(value) in (bool, int, float, str)))
    def check(value: Any) -> None:
        with pytest.raises(ValidationError) as caught:
            SchedulerOptions.model_validate({one.name: value})
        assert {error["loc"] for error in caught.value.errors()} == {(one.name, 0)}

    check()


def test_options_are_resolved_for_a_model() -> None:
    options = EngineOptions(max_num_seqs=4, block_size=8, preemption="swap", swap_bytes=1000)
    sizes = {"max_position_embeddings": 100, "block_size": 8, "sizes": UnitSizes(block_bytes=300)}
    resolved = resolve_options(options, **sizes, cache_bytes=3000)
    assert (resolved.max_model_len, resolved.num_blocks, resolved.num_host_blocks) == (100, 10, 3)
    most = resolve_options(options, **sizes, cache_bytes=10**9)
    assert most.num_blocks == 4 * 100 // 8
    scheduler = Scheduler(resolved)
    assert (scheduler.pool.num_blocks, scheduler.pool.block_size, scheduler.host_pool.num_blocks) == (10, 8, 3)
    for wrong, name in (
        ({"max_model_len": 101}, "max_model_len"),
        ({"kv_cache_bytes": 299}, "kv_cache_bytes"),
        ({"preemption": "swap", "swap_bytes": 299}, "swap_bytes"),
        ({}, "kv_cache_fraction"),
    ):
        with pytest.raises(OptionError) as caught:
            resolve_options(EngineOptions(**wrong), **sizes, cache_bytes=299 if name.startswith("kv") else 3000)
        assert caught.value.option == name


@pytest.mark.parametrize(
    ("num_bytes", "most", "expected"),
    [
        (1000, (99, 99), (8, 2)),  # a sequence takes 4 x 100 + 1 x 100 bytes
        (1000, (4, 99), (4, 6)),
        (1000, (4, 5), (4, 5)),
        (1000, (99, 1), (9, 1)),
        (99, (99, 99), (0, 0)),
    ],
)
def test_bytes_are_shared_out_by_what_a_sequence_needs(
    num_bytes: int, most: tuple[int, int], expected: tuple[int, int]
) -> None:
    sizes = UnitSizes(block_bytes=100, state_bytes=100)
    assert split_bytes(num_bytes, sizes, CacheUnits(4, 1), CacheUnits(*most)) == CacheUnits(*expected)


def test_states_are_sized_beside_blocks() -> None:
    options = EngineOptions(max_num_seqs=4, block_size=8, prefix_cache="hash", preemption="swap", swap_bytes=10_000)
    hybrid = UnitSizes(block_bytes=300, state_bytes=1000, state_interval=2)
    sizes = {"max_position_embeddings": 160, "block_size": 8, "cache_bytes": 31_000}
    half = resolve_options(options, sizes=hybrid, **sizes)
    # 10 blocks and 3 states a request of 80 tokens, 6,000 bytes: of 30,000, past the slot for padding, 15 states.
    assert (half.num_blocks, half.num_states, half.state_interval) == (50, 15, 2)
    assert (half.num_host_blocks, half.num_host_states) == (26, 2)
    short = resolve_options(replace(options, expected_len=8), sizes=hybrid, **sizes)
    assert (short.num_blocks, short.num_states) == (10, 27)
    assert Scheduler(short).states.pool.num_blocks == 27
    states_alone = UnitSizes(block_bytes=0, state_bytes=1000)
    resolved = resolve_options(options, sizes=states_alone, **sizes)
    assert (resolved.num_blocks, resolved.num_states, resolved.num_host_states) == (80 + 88, 30, 10)
    for wrong, unit_sizes, name in (
        ({"expected_len": 8}, UnitSizes(block_bytes=300), "expected_len"),
        ({"expected_len": 161}, hybrid, "expected_len"),
        ({"kv_cache_bytes": 2999}, states_alone, "kv_cache_bytes"),
        ({"preemption": "swap", "swap_bytes": 1299}, hybrid, "swap_bytes"),
    ):
        given = 31_000 if name == "swap_bytes" else 2999
        with pytest.raises(OptionError) as caught:
            resolve_options(
                EngineOptions(**wrong), sizes=unit_sizes, block_size=16, max_position_embeddings=160, cache_bytes=given
            )
        assert caught.value.option == name
    needs = "one of 16 tokens takes 300 bytes, a request's state 1000, got 1299"
    assert needs in str(caught.value)
