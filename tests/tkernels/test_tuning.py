"""Lockfiles: which config a call gets, what is said about it, and that two processes do not corrupt one."""

import json
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from tests.tkernels.outside import DOUBLED, write_variant
from tkernels import OPS, Config, Tuning, TuningError
from tkernels.buckets import bucket
from tkernels.device import TARGETS
from tkernels.lockfile import Entry, lockfile, read_lockfile, record, tuned_devices
from tkernels.source_hash import source_hash
from tkernels.tuning import search
from tkernels.variant import Variant

H200 = TARGETS["sm_90"]
AXES = {"T": 7, "I": 100, "activation": "bfloat16"}


OFFERED = "configs=(Config(), Config(num_warps=8))"


def load(folder: Path, *changes: tuple[str, str]) -> Variant:
    """The outside variant, as if it offered 1, 2, 4, 8 and 16 warps unless the changes say otherwise."""
    if not any(before == OFFERED for before, _ in changes):
        changes = ((OFFERED, "configs=tuple(Config(num_warps=w) for w in (1, 2, 4, 8, 16))"), *changes)
    return OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]


def entry_for(variant: Variant, config: Config, **changes: str) -> Entry:
    import triton

    source = source_hash(variant.kernels)
    key = {"op": "swiglu", "variant": "doubled", "source": source, "triton": triton.__version__, **changes}
    return Entry(**{"bucket": bucket(variant, AXES), **key}, config=config, timings=((config, 1.0, ""),))


def test_the_bucket_is_the_key_axes_rounded_up_and_the_dtypes(tmp_path: Path) -> None:
    assert bucket(load(tmp_path), AXES) == "I<=128,activation=bfloat16"


def test_an_exact_entry_wins_and_an_outside_variants_lockfile_lies_beside_it(tmp_path: Path) -> None:
    variant, config = load(tmp_path), Config(num_warps=8)
    path = lockfile(variant, H200)
    assert path == tmp_path / "swiglu" / "NVIDIA_H200.json"
    record(path, H200, entry_for(variant, config))
    tuning = Tuning("frozen")
    assert tuning.resolve(variant, AXES, H200) == config
    assert tuning.used == {"swiglu.doubled[I<=128,activation=bfloat16]": {"config": config.as_dict(), "match": "exact"}}


def test_nearest_takes_another_version_then_a_stale_source_then_the_default(tmp_path: Path) -> None:
    variant = load(tmp_path)
    path = lockfile(variant, H200)
    assert Tuning().resolve(variant, AXES, H200) == variant.default_config("sm_90")
    assert Tuning().match(variant, AXES, H200) == "default"
    record(path, H200, entry_for(variant, Config(num_warps=1), source="0" * 16))
    with pytest.warns(UserWarning, match="tuned with stale source"):
        assert Tuning().resolve(variant, AXES, H200).num_warps == 1
    record(path, H200, entry_for(variant, Config(num_warps=2), triton="3.5.0"))
    tuning = Tuning()
    with pytest.warns(UserWarning, match="tuned with other Triton version") as said:
        configs = [tuning.resolve(variant, AXES, H200) for _ in range(2)]
    assert [config.num_warps for config in configs] == [2, 2]
    assert len(said) == 1
    assert tuning.match(variant, AXES, H200) == "other Triton version"


def test_a_config_that_its_variant_no_longer_offers_is_not_used(tmp_path: Path) -> None:
    variant = load(tmp_path)
    taken_out, kept = Config(num_warps=32), Config(num_warps=2)
    entry = entry_for(variant, taken_out)
    record(lockfile(variant, H200), H200, replace(entry, timings=((taken_out, 1.0, ""), (kept, 5.0, ""))))
    tuning = Tuning()
    with pytest.warns(UserWarning, match=r"'num_warps': 32, .* is left out: swiglu.doubled does not offer it") as said:
        configs = [tuning.resolve(variant, axes, H200) for axes in (AXES, {**AXES, "I": 1000})]
    assert configs == [kept, variant.default_config("sm_90")]
    assert len(said) == 1
    record(lockfile(variant, H200), H200, replace(entry_for(variant, taken_out), bucket="I<=16,activation=bfloat16"))
    axes = {**AXES, "I": 16}
    assert Tuning().match(variant, axes, H200) == "default"
    with pytest.raises(TuningError, match="has no entry"):
        Tuning("frozen").resolve(variant, axes, H200)


def test_frozen_fails_on_anything_but_exact(tmp_path: Path) -> None:
    variant = load(tmp_path)
    record(lockfile(variant, H200), H200, entry_for(variant, Config(), triton="3.5.0"))
    with pytest.raises(TuningError, match="tuning is frozen and NVIDIA_H200.json has no entry"):
        Tuning("frozen").resolve(variant, AXES, H200)


@dataclass
class FakeTimer:
    """Measures by a table of microseconds by num_warps; 16 warps do not fit, and the process may be stopped at one."""

    times: dict[int, float]
    stop_at: int | None = None
    timed: list[int] = field(default_factory=list)

    def launch(self, config: Config) -> Callable[[], None]:
        self.timed.append(config.num_warps)
        return lambda: None

    def measure(self, run: Callable[[], None]) -> float:
        warps = self.timed[-1]
        if warps == self.stop_at:
            raise KeyboardInterrupt
        if warps == 16:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return self.times[warps]


def with_configs(folder: Path, *warps: int) -> Variant:
    configs = "".join(f"Config(num_warps={w}), " for w in warps)
    return load(folder, (OFFERED, f"configs=({configs})"))


def test_search_times_every_config_skips_one_that_does_not_fit_and_records(tmp_path: Path) -> None:
    variant, timer = with_configs(tmp_path, 8, 16), FakeTimer({4: 3.0, 8: 2.0})
    tuning = Tuning("search", measure=timer.measure)
    assert tuning.resolve(variant, AXES, H200, timer.launch) == Config(num_warps=8)
    (entry,) = read_lockfile(lockfile(variant, H200)).values()
    assert sorted((config.num_warps, us) for config, us, _ in entry.timings if us) == [(4, 3.0), (8, 2.0)]
    (refused,) = [why for config, _, why in entry.timings if config.num_warps == 16]
    assert "shared memory" in refused
    assert timer.timed == [4, 8, 16]  # the default first, whether it is among the configs or not
    assert Tuning("frozen").resolve(variant, AXES, H200) == Config(num_warps=8)
    assert Tuning("frozen").match(variant, AXES, H200) == "exact"


def test_a_config_whose_options_the_architecture_does_not_have_is_named_and_skipped(tmp_path: Path) -> None:
    options = "configs=(Config(num_warps=8, maxnreg=96), Config(num_warps=8))"
    variant, timer = load(tmp_path, (OFFERED, options)), FakeTimer({4: 3.0, 8: 2.0})
    mi300, path = TARGETS["gfx942"], tmp_path / "A.json"
    entry = search(variant, mi300, "I<=128", timer.launch, timer.measure, path)
    assert {config: us for config, us, _ in entry.timings} == {
        Config(): 3.0, Config(num_warps=8, maxnreg=96): None, Config(num_warps=8): 2.0
    }  # fmt: skip
    (why,) = [why for _, us, why in entry.timings if us is None]
    assert "maxnreg is an option of NVIDIA's compiler; this is gfx942" in why
    assert read_lockfile(path)[entry.key] == entry
    assert entry.config == Config(num_warps=8)


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    variant, path = with_configs(tmp_path, 8, 2, 16), tmp_path / "H.json"
    first = FakeTimer({4: 3.0, 8: 2.0, 2: 1.0}, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        search(variant, H200, "I<=128", first.launch, first.measure, path)
    second = FakeTimer(first.times)
    entry = search(variant, H200, "I<=128", second.launch, second.measure, path)
    assert (first.timed, second.timed) == ([4, 8, 2], [2, 16])
    assert entry.config == Config(num_warps=2)
    assert len(entry.timings) == 4
    third = FakeTimer({})
    assert search(variant, H200, "I<=128", third.launch, third.measure, path) == entry
    assert third.timed == []


def test_one_more_config_is_all_that_is_timed_anew(tmp_path: Path) -> None:
    before, path = with_configs(tmp_path / "before", 8), tmp_path / "H.json"
    timer = FakeTimer({4: 3.0, 8: 2.0, 2: 1.0})
    search(before, H200, "I<=128", timer.launch, timer.measure, path)
    after = with_configs(tmp_path / "after", 2, 8)  # another file of the same kernel
    told: list[int] = []
    search(after, H200, "I<=128", timer.launch, timer.measure, path, lambda timing: told.append(timing[0].num_warps))
    assert timer.timed == [4, 8, 2]
    assert told == [2]
    (entry,) = read_lockfile(path).values()
    assert {config.num_warps: us for config, us, _ in entry.timings} == timer.times


def test_a_comment_in_the_kernel_keeps_its_entries(tmp_path: Path) -> None:
    before = load(tmp_path)
    record(lockfile(before, H200), H200, entry_for(before, Config(num_warps=8)))
    after = load(tmp_path, ("    mask = offs", "    # why\n    mask = offs"))
    assert Tuning("frozen").resolve(after, AXES, H200) == Config(num_warps=8)
    assert tuned_devices(after) == ["NVIDIA H200"]
    changed = load(tmp_path, ("    mask = offs < width", "    mask = offs <= width"))
    assert tuned_devices(changed) == []


def test_recording_keeps_the_timings_of_configs_not_tried_again(tmp_path: Path) -> None:
    variant = load(tmp_path)
    path = tmp_path / "H.json"
    fast, slow = Config(num_warps=8), Config(num_warps=4)
    record(path, H200, entry_for(variant, slow))
    record(path, H200, Entry(*entry_for(variant, fast).key, config=fast, timings=((fast, 0.5, ""),)))
    (entry,) = read_lockfile(path).values()
    assert {config: us for config, us, _ in entry.timings} == {fast: 0.5, slow: 1.0}
    assert entry.config == fast


def test_search_fails_loudly_where_no_config_fits(tmp_path: Path) -> None:
    def measure(run: Callable[[], None]) -> float:
        raise OutOfResources(2, 1, "shared memory")

    with pytest.raises(TuningError, match="no config could be timed"):
        search(load(tmp_path), H200, "I<=128", lambda config: lambda: None, measure, tmp_path / "H.json")
    assert not (tmp_path / "H.json").exists()


def _record_one(path: Path, index: int, entry: Entry) -> None:
    record(
        path,
        H200,
        Entry(entry.op, entry.variant, entry.source, entry.triton, f"I<={index}", entry.config, entry.timings),
    )


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    path, entry = tmp_path / "H.json", entry_for(load(tmp_path), Config())
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_record_one, args=(path, index, entry)) for index in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(read_lockfile(path)) == 8
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("arch", "fastest", "why"),
    [
        ("sm_80", Config(num_warps=8, launch_pdl=1), "launch_pdl needs programmatic dependent launch, of sm_90"),
        ("gfx942", Config(num_warps=8, maxnreg=128), "maxnreg is an option of NVIDIA's compiler; this is gfx942"),
        ("sm_90", Config(num_warps=32, maxnreg=255), "32 warps of 255 registers a thread are more than a block's"),
    ],
)
def test_a_tuned_config_that_the_device_cannot_launch_is_named_once_and_the_next_best_is_used(
    arch: str, fastest: Config, why: str, tmp_path: Path
) -> None:
    facts, next_best = TARGETS[arch], Config(num_warps=2)
    variant = replace(load(tmp_path), configs=(fastest, next_best))
    entry = entry_for(variant, fastest)
    path = lockfile(variant, facts)
    record(path, facts, replace(entry, timings=((fastest, 1.0, ""), (next_best, 5.0, ""))))
    record(path, facts, replace(entry, bucket="I<=16,activation=bfloat16"))
    tuning = Tuning()
    with pytest.warns(UserWarning, match=f"{path.name}: swiglu.doubled .* is left out: {why}") as said:
        configs = [one.resolve(variant, AXES, facts) for one in (tuning, replace(tuning, _resolved={}))]
    assert configs == [next_best, next_best]
    assert len(said) == 1
    assert tuning.match(variant, AXES, facts) == "exact"
    with pytest.warns(UserWarning, match=rf"\[I<=16.* is left out: {why}"):
        assert tuning.resolve(variant, {**AXES, "I": 16}, facts) == variant.default_config(arch)


def test_an_older_entry_is_not_asked_about_where_a_newer_one_is_used(tmp_path: Path) -> None:
    variant = load(tmp_path)
    path = lockfile(variant, H200)
    record(path, H200, entry_for(variant, Config(num_warps=32), source="0" * 16))
    record(path, H200, entry_for(variant, Config(num_warps=2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Tuning().resolve(variant, AXES, H200) == Config(num_warps=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not a lockfile: JSONDecodeError"),
        (b"\xff{}", "not a lockfile: UnicodeDecodeError"),
        (b"[" * 100_000, "not a lockfile: RecursionError"),
        (b"[]", "not a lockfile: it must be an object, got list"),
        (b'{"entries": []}', "not a lockfile: 'device' must be text, got NoneType"),
        (b'{"device": "NVIDIA H200", "entries": {}}', "not a lockfile: 'entries' must be a list, got dict"),
        (None, "cannot be read: Is a directory"),
    ],
    ids=["no JSON", "no UTF-8", "too deep", "no object", "no device", "no list", "folder"],
)
def test_what_is_no_lockfile_is_named(content: bytes | None, said: str, tmp_path: Path) -> None:
    variant = load(tmp_path)
    path = lockfile(variant, H200)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(TuningError, match=f"NVIDIA_H200.json: {said}"):
        Tuning().resolve(variant, AXES, H200)
    with pytest.raises(TuningError, match=f"NVIDIA_H200.json: {said}"):
        record(path, H200, entry_for(variant, Config()))
    assert tuned_devices(variant) == []


TIMING = {"config": {"num_warps": 4, "num_stages": 2}, "us": 1.0, "reason": ""}
DAMAGE: dict[str, tuple[Any, str]] = {
    "illegal config": ({"config": {"maxnreg": 999}}, "maxnreg must be at most 255, got 999"),
    "no object": ({"config": None}, "config must be an object, got None"),
    "a constant called self": ({"config": {"self": 1}}, "multiple values for argument 'self'"),
    "op": ({"op": None}, "op must be text, got None"),
    "bucket": ({"bucket": 5}, "bucket must be text, got 5"),
    "triton": ({"triton": 3}, "triton must be text, got 3"),
    "timings": ({"timings": None}, "timings must be a list, got None"),
    "no timing": ({"timings": [7]}, "a timing must be an object, got 7"),
    "reason": ({"timings": [{**TIMING, "reason": None}]}, "reason must be text, got None"),
    "words": ({"timings": [{**TIMING, "us": "fast"}]}, "us must be a number or null, got 'fast'"),
    "no time": ({"timings": [{**TIMING, "us": 0.0}]}, "us must be finite and above 0, got 0.0"),
    "less": ({"timings": [{**TIMING, "us": -1}]}, "us must be finite and above 0, got -1"),
    "no number": ({"timings": [{**TIMING, "us": float("nan")}]}, "us must be finite and above 0, got nan"),
    "for ever": ({"timings": [{**TIMING, "us": float("inf")}]}, "us must be finite and above 0, got inf"),
    "too long": ({"timings": [{**TIMING, "us": 10**400}]}, "us must be finite and above 0, got 1000"),
    "not timed": ({"timings": [{**TIMING, "us": None}]}, "has no time among the timings"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_named_and_left_out_and_the_others_are_used(damage: str, tmp_path: Path) -> None:
    variant = load(tmp_path)
    whole = entry_for(variant, Config(num_warps=2))
    changes, why = DAMAGE[damage]
    damaged = {**entry_for(variant, Config()).as_json(), "bucket": "I<=16,activation=bfloat16", **changes}
    path = lockfile(variant, H200)
    path.write_text(json.dumps({"device": H200.name, "entries": [damaged, 5, whole.as_json()]}))
    said = rf"{path}: left out: entry 1 \(.*: .*{why}.*; entry 2: must be an object, got 5$"
    with pytest.warns(UserWarning, match=said) as warned:
        assert Tuning("frozen").resolve(variant, AXES, H200) == Config(num_warps=2)
    assert len(warned) == 1
    assert tuned_devices(variant) == [H200.name]


def test_recording_keeps_what_is_no_entry_but_for_what_it_records_anew(tmp_path: Path) -> None:
    variant, path = load(tmp_path), tmp_path / "H.json"
    other = {**entry_for(variant, Config()).as_json(), "bucket": 5}
    own = {**entry_for(variant, Config()).as_json(), "config": {"maxnreg": 999}}
    path.write_text(json.dumps({"device": H200.name, "entries": [other, own]}))
    entry = record(path, H200, entry_for(variant, Config()))
    assert json.loads(path.read_text())["entries"] == [entry.as_json(), other]


def test_the_source_hash_ignores_comments_and_sees_code_and_called_helpers(tmp_path: Path) -> None:
    plain = source_hash(load(tmp_path / "a").kernels)
    comment = ("    mask = offs", "    # why\n    mask = offs")
    assert source_hash(load(tmp_path / "b", comment).kernels) == plain
    assert source_hash(load(tmp_path / "c", ("offs < width", "offs <= width")).kernels) != plain
    less = ("@triton.jit\ndef swiglu_doubled", '@triton.jit(do_not_specialize=["width"])\ndef swiglu_doubled')
    assert source_hash(load(tmp_path / "f", less).kernels) != plain
    helper = DOUBLED.replace("@triton.jit", "@triton.jit\ndef times(a, b):\n    return a * b\n\n\n@triton.jit", 1)
    helper = helper.replace(
        "gate / (1 + tl.exp(-gate)) * up * FACTOR", "times(gate / (1 + tl.exp(-gate)), up) * FACTOR"
    )
    hashes = []
    for name, source in (("d", helper), ("e", helper.replace("return a * b", "return b * a"))):
        (tmp_path / name / "swiglu").mkdir(parents=True)
        (tmp_path / name / "swiglu" / "doubled.py").write_text(source)
        kernels = OPS.with_variants_from(tmp_path / name)["swiglu"].variants["doubled"].kernels
        hashes.append(source_hash({"swiglu_doubled": kernels["swiglu_doubled"]}))
    assert hashes[0] != hashes[1]
