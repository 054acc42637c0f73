"""Arms that take turns: their order, what one's failure does to the others, and groups where memory is short."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiments.stages.engine
import experiments.stages.memory
from experiments.plan import Plan
from experiments.rows import EngineRow, PeerRow
from experiments.run_folder import RunFolder
from experiments.runner import failures
from experiments.stages.memory import groups_of
from experiments.stages.serving import Served, interleaved
from experiments.timed_llm import TimedLLM, Timeline
from tests.experiments.test_baselines import SMALL, SYNTHETIC, rows_of
from tests.experiments.test_run import printed
from tsched.cache_size import weight_bytes

Run = Callable[..., RunFolder]
MakePlan = Callable[..., Plan]


def keys_of(checkpoint: Path, **scheduler: Any) -> dict[str, Any]:
    options = {**SMALL, **scheduler}
    return {"model": {"path": str(checkpoint)}, "scheduler": options, "workload": dict(SYNTHETIC), "repeats": 2}


def test_the_rounds_of_arms_take_turns_and_every_second_time_the_other_way_round(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    class Noting(TimedLLM):
        def serve(self, *args: Any, **kwargs: Any) -> Timeline:
            served.append((self._engine.scheduler.pool.block_size, kwargs["salt"]))
            return super().serve(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Noting)
    folder = run(**keys_of(checkpoint, block_size=[8, 16, 32]))
    assert failures(folder) == []
    answers, rounds = served[:3], served[3:]
    assert answers == [(size, ", answer") for size in (8, 16, 32)]
    assert rounds == [
        *((size, ", round 0") for size in (32, 16, 8)),  # not counted
        *((size, ", round 1") for size in (8, 16, 32)),
        *((size, ", round 2") for size in (32, 16, 8)),
    ]
    assert [(row.settings["block_size"], row.group) for row in rows_of(folder, EngineRow)] == [(8, 1), (16, 1), (32, 1)]


def test_an_arm_that_fails_in_a_round_fails_alone(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(TimedLLM):
        def serve(self, *args: Any, **kwargs: Any) -> Timeline:
            if self._engine.scheduler.pool.block_size == 8 and kwargs["salt"].endswith("round 1"):
                raise RuntimeError("lost the device")
            return super().serve(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Failing)
    folder = run(**keys_of(checkpoint, block_size=[8, 16]), peers=["without_kv_cache"])
    first, second = rows_of(folder, EngineRow)
    assert (first.status, first.reason) == ("failed", "RuntimeError: lost the device")
    assert second.status == "ok"
    assert len(second.seconds) == 2
    (peer,) = rows_of(folder, PeerRow)
    assert peer.status == "failed"
    assert peer.reason == "the arm that it is compared with: RuntimeError: lost the device"


def test_a_server_that_raised_is_asked_no_more() -> None:
    calls: list[str] = []

    def server(name: str, fails_at: int) -> Callable[[], Served]:
        def serve() -> Served:
            calls.append(name)
            if calls.count(name) == fails_at:
                raise ValueError(name)
            return Served(((1,),), 1, 1.0, None)

        return serve

    good, bad = interleaved([server("good", 0), server("bad", 2)], 3, lambda: None)
    assert isinstance(bad, ValueError)
    assert isinstance(good, list)
    assert len(good) == 3
    assert (calls.count("good"), calls.count("bad")) == (4, 2)


def test_memory_bounds_how_many_engines_there_are_at_once(
    run: Run, plan: MakePlan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two engines and a half, by their weights and caches: groups of two and one, and the report says so."""
    keys = keys_of(checkpoint, block_size=[8, 16, 32])
    made = plan(**keys)
    assert made.model is not None
    ((first, second, third),) = groups_of(made, enumerate(made.arms))
    assert first.kv_cache_bytes == second.kv_cache_bytes == third.kv_cache_bytes
    each = weight_bytes(made.model.directory(), made.model.config, made.dtype) + first.kv_cache_bytes
    monkeypatch.setattr(experiments.stages.memory, "device_memory", lambda device: (5 * each, 0))
    groups = list(groups_of(made, enumerate(made.arms)))
    assert [[seat.index for seat in group] for group in groups] == [[0, 1], [2]]
    folder = run(**keys)
    assert failures(folder) == []
    assert [row.group for row in rows_of(folder, EngineRow)] == [1, 1, 2]
    assert "The engines were in memory in 2 groups" in " ".join(printed(made, folder, 100).split())


def test_a_share_of_memory_is_bytes_before_another_engine_takes_some(
    plan: MakePlan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(checkpoint, kv_cache_fraction=[0.25, 0.75])
    del keys["scheduler"]["kv_cache_bytes"]
    keys["scheduler"]["max_num_seqs"] = 256
    made = plan(**keys)
    memory = 2**21
    monkeypatch.setattr(experiments.stages.memory, "device_memory", lambda device: (memory, 0))
    monkeypatch.setattr("tsched.cache_size.device_memory", lambda device: (memory, 0))
    assert made.model is not None
    weights = weight_bytes(made.model.directory(), made.model.config, made.dtype)
    (small,), (large,) = groups_of(made, enumerate(made.arms))
    for seat, share in ((small, 0.25), (large, 0.75)):
        assert seat.options["kv_cache_fraction"] is None
        assert seat.options["kv_cache_bytes"] == seat.kv_cache_bytes
        assert 0 <= share * memory - weights - seat.kv_cache_bytes < 2**14


def test_there_is_one_time_to_the_first_token(run: Run, plan: MakePlan, checkpoint: Path) -> None:
    keys = keys_of(checkpoint)
    folder = run(**keys)
    (row,) = rows_of(folder, EngineRow)
    assert "time_to_first_token_s" not in row.as_json()
    lines = printed(plan(**keys), folder, 100).splitlines()
    engine = next(line.split() for line in lines if line.strip().startswith("ok"))
    waiting = next(line.split() for line in lines if line.strip().startswith("this engine"))
    assert engine[3] == waiting[2].split("/")[0] == f"{row.ttft_s['p50'] * 1e3:.3g}"
