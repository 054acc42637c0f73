"""Arms and peers that are compared for speed: their order over replicates, what one's failure does to the others, and
that none of it depends on who else is there.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import experiments.stages.engine
from experiments.document import read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.runs.folder import RunFolder
from experiments.runs.rows import Row
from experiments.serving.rounds import Served, interleaved
from experiments.stages.task import Task
from experiments.stages.timed_llm import TimedLLM, Timeline
from experiments.sweep.listing import later_replicates
from experiments.sweep.runner import failures, run_experiment
from tests.experiments.conftest import Write
from tests.experiments.in_process import InProcess
from tests.experiments.test_baselines import SMALL, SYNTHETIC, rows_of
from tests.experiments.test_run import printed

Run = Callable[..., RunFolder]
MakePlan = Callable[..., Plan]


def keys_of(checkpoint: Path, **scheduler: Any) -> dict[str, Any]:
    options = {**SMALL, **scheduler}
    return {"model": {"path": str(checkpoint)}, "scheduler": options, "workload": dict(SYNTHETIC), "repeats": 2}


def test_replicates_of_arms_take_turns_and_every_second_one_goes_the_other_way_round(
    write: Write, tmp_path: Path, checkpoint: Path
) -> None:
    file = write(**keys_of(checkpoint, block_size=[8, 16, 32]), peers=["without_kv_cache"], replicates=3)
    executor = InProcess()
    folder = run_experiment(
        make_sweep(read_document(file)), tmp_path / "run", [], Console(quiet=True), executor=executor
    )
    assert failures(folder) == []
    served = [key.removeprefix("engine/") for key in executor.tasks if key.startswith(("engine/", "peers/"))]
    assert served == [
        *("block_size=8#0", "block_size=16#0", "block_size=32#0", "peers/without_kv_cache#0"),
        *("peers/without_kv_cache#1", "block_size=32#1", "block_size=16#1", "block_size=8#1"),
        *("block_size=8#2", "block_size=16#2", "block_size=32#2", "peers/without_kv_cache#2"),
    ]
    timed = [key for key in executor.tasks if key.startswith("kernels/")]
    first, second, third = (
        [key.partition("#")[0] for key in group]
        for _, group in itertools.groupby(timed, lambda key: key.partition("#")[2])
    )
    assert second == first[::-1]
    assert third == first
    assert len(first) > 5
    rows = rows_of(folder, "engine")
    assert Counter((row.settings["block_size"], row.replicate) for row in rows) == dict.fromkeys(
        itertools.product((8, 16, 32), (0, 1, 2)), 1
    )


def test_nobody_always_follows_the_same_one() -> None:
    """Of any two that are compared, each comes before the other as often, and in each replicate everyone comes once."""
    tasks = [Task(f"engine/{name}#0", "engine") for name in "abcd"]
    row = Row.model_construct(stage="engine", status="ok", tokens_per_s=1.0)
    order = [task.key for task in [*tasks, *later_replicates(tasks, 6, lambda key: [row])]]
    rounds = [[key[7] for key in order[i : i + 4]] for i in range(0, 24, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    for a, b in itertools.combinations("abcd", 2):
        assert sum(one.index(a) < one.index(b) for one in rounds) == 3


def test_what_has_no_speed_is_not_repeated(run: Run, checkpoint: Path) -> None:
    """An interpreted kernel would be interpreted again."""
    folder = run(**keys_of(checkpoint), kernels={"swiglu": ["torch", "fused"]}, device="cpu", replicates=2)
    assert [(row.arm["swiglu"], row.replicate) for row in rows_of(folder, "engine")] == [
        ("torch", 0), ("fused", 0), ("torch", 1),
    ]  # fmt: skip


def test_the_rounds_of_a_task_share_no_prefix_and_the_first_is_not_counted(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    class Noting(TimedLLM):
        def serve(self, *args: Any, **kwargs: Any) -> Timeline:
            served.append(kwargs["salt"])
            return super().serve(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Noting)
    folder = run(**keys_of(checkpoint))
    assert served == [", answer", ", round 0", ", round 1", ", round 2"]
    assert [len(row.seconds) for row in rows_of(folder, "engine")] == [2]


def test_an_arm_that_fails_in_a_round_fails_alone(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(TimedLLM):
        def serve(self, *args: Any, **kwargs: Any) -> Timeline:
            if self._engine.scheduler.pool.block_size == 8 and kwargs["salt"].endswith("round 1"):
                raise RuntimeError("lost the device")
            return super().serve(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Failing)
    folder = run(**keys_of(checkpoint, block_size=[8, 16]), peers=["without_kv_cache"], replicates=2)
    failed, *others = rows_of(folder, "engine")
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: lost the device")
    assert [(row.status, row.settings["block_size"], row.replicate) for row in others] == [("ok", 16, 0), ("ok", 16, 1)]
    assert all(len(row.seconds) == 2 for row in others)
    assert [row.status for row in rows_of(folder, "peers")] == ["ok", "ok"]
    (beside,) = rows_of(folder, "speedup")  # it is compared with the first arm that was timed
    assert beside.settings == {"block_size": 16}
    assert len(beside.speedups) == 2


def test_a_replicate_that_fails_is_left_out_of_the_ratio(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TimedLLM] = []

    class FailingLater(TimedLLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            if len(made) == 2:
                raise RuntimeError("no device")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", FailingLater)
    folder = run(**keys_of(checkpoint), peers=["without_kv_cache"], replicates=3)
    assert [(row.replicate, row.status) for row in rows_of(folder, "engine")] == [(0, "ok"), (1, "failed"), (2, "ok")]
    (beside,) = rows_of(folder, "speedup")
    peers = {row.replicate: row for row in rows_of(folder, "peers")}
    arms = {row.replicate: row for row in rows_of(folder, "engine")}
    assert beside.speedups == [arms[r].tokens_per_s / peers[r].tokens_per_s for r in (0, 2)]


def test_a_server_that_raises_ends_the_rounds() -> None:
    calls: list[str] = []

    def server(name: str, fails_at: int) -> Callable[[], Served]:
        def serve() -> Served:
            calls.append(name)
            if calls.count(name) == fails_at:
                raise ValueError(name)
            return Served(((1,),), 1, 1.0, None)

        return serve

    with pytest.raises(ValueError, match="^bad$"):
        interleaved([server("good", 0), server("bad", 2)], 3, lambda: None)
    assert calls == ["bad", "good", "good", "bad"]


def test_in_one_process_rounds_take_turns_too() -> None:
    """As a quantized model's do with the dense one's."""
    calls: list[str] = []

    def server(name: str) -> Callable[[], Served]:
        def serve() -> Served:
            calls.append(name)
            return Served(((1,),), 1, 1.0, None)

        return serve

    interleaved([server(name) for name in "abc"], 2, lambda: None)
    assert "".join(calls) == "cbaabccba"


def test_a_share_of_memory_is_of_all_of_it_for_every_arm(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine is alone in its process: what one arm's share is does not depend on the arms before it."""
    sizes: list[int] = []

    class Noting(TimedLLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            sizes.append(self._engine.scheduler.pool.num_blocks)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Noting)
    monkeypatch.setattr("tsched.execution.cache_size.device_memory", lambda device: (2**21, 0))
    keys = keys_of(checkpoint, kv_cache_fraction=[0.25, 0.75])
    del keys["scheduler"]["kv_cache_bytes"]
    keys["scheduler"]["max_num_seqs"] = 256
    run(**keys)
    small, large = sizes
    assert large > 2 * small


def test_there_is_one_time_to_the_first_token(run: Run, plan: MakePlan, checkpoint: Path) -> None:
    keys = keys_of(checkpoint)
    folder = run(**keys)
    (row,) = rows_of(folder, "engine")
    assert "time_to_first_token_s" not in row.as_json()
    lines = printed(plan(**keys), folder, 100).splitlines()
    engine = next(line.split() for line in lines if line.strip().startswith("ok"))
    waiting = next(line.split() for line in lines if line.strip().startswith("this engine"))
    assert engine[3] == waiting[2].split("/")[0] == f"{row.ttft_s['p50'] * 1e3:.3g}"
