"""What the baselines of a serving engine need: requests that share a beginning or come late, batches that wait for
their slowest, a peer without a KV cache, and percentiles of what users wait for.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import experiments.stages.engine
from experiments.document import read_document
from experiments.planning.plan import Plan
from experiments.planning.requests import requests_of
from experiments.runs.folder import RunFolder
from experiments.schema import LateRequests, Length, SyntheticWorkload
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from experiments.stages.served_figures import percentiles, summarize_times
from experiments.stages.timed_llm import TimedLLM, Timeline
from experiments.sweep.runner import failures
from tests.experiments.planning.single_plan import make_plan
from tests.experiments.test_run import printed
from tsched import SamplingParams

Run = Callable[..., RunFolder]
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 8, "kv_cache_bytes": 1 << 18}
SYNTHETIC: dict[str, Any] = {"kind": "synthetic", "num_requests": 5, "input_len": 20, "output_len": 6}
BASELINES = (
    "kv_cache", "batching", "batching_in_service", "paged_memory", "prefix_cache", "chunked_prefill", "priorities",
)  # fmt: skip


def rows_of(folder: RunFolder, stage: str) -> Sequence[Any]:
    return [row for row in folder.rows if row.stage == stage]


def workload(**keys: Any) -> SyntheticWorkload:
    return SyntheticWorkload.model_validate({**SYNTHETIC, **keys})


@pytest.mark.parametrize("name", BASELINES)
def test_each_baseline_resolves(name: str) -> None:
    plan = make_plan(read_document(Path(experiments.__file__).parent / f"{name}.yaml"))
    assert len(plan.arms) > 1 or plan.experiment.peers
    assert not plan.unsupported


def test_the_lengths_of_service_leave_a_static_batch_idle_for_most_of_its_steps() -> None:
    """Steps of 16 rows, prompts aside: a static batch takes its longest output's, a continuous one fills a free row."""
    plan = make_plan(read_document(Path(experiments.__file__).parent / "batching_in_service.yaml"))
    requests = requests_of(plan.workloads[0].requests, 1024)
    assert len(requests) == 510
    outputs = [request.params.max_tokens or 0 for request in requests]
    assert 900 < max(len(request.prompt) + most for request, most in zip(requests, outputs, strict=True)) <= 1024
    static = sum(max(outputs[start : start + 16]) for start in range(0, 510, 16))
    rows = [0] * 16
    for steps in outputs:
        rows.sort()
        rows[0] += steps
    assert static > 2.2 * max(rows)


def test_prompts_share_the_beginning_that_is_asked_for_and_no_more() -> None:
    plain = requests_of(workload(input_len=40), 1000)
    sharing = requests_of(workload(input_len=40, shared_prefix=0.75), 1000)
    prompts = [request.prompt for request in sharing]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({prompt[30] for prompt in prompts}) > 1
    assert [prompt[30:] for prompt in prompts] == [request.prompt[30:] for request in plain]
    assert len({tuple(request.prompt[:2]) for request in plain}) == len(plain)


def test_late_requests_are_drawn_after_the_others() -> None:
    late = LateRequests(num_requests=2, input_len=Length(uniform=[7, 9]), output_len=Length(uniform=[3, 3]), every=2)
    plain, found = requests_of(workload(), 1000), requests_of(workload(late=late), 1000)
    assert found[:5] == plain
    assert [request.after for request in found] == [0] * 5 + [2, 4]
    assert all(7 <= len(request.prompt) <= 9 and request.params.max_tokens == 3 for request in found[5:])
    assert workload(late=late).longest == 26


@pytest.fixture
def llm(checkpoint: Path) -> TimedLLM:
    return TimedLLM(checkpoint, **SMALL)


def short(prompt: list[int], outputs: int, after: int = 0) -> Request:
    return Request(prompt, SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True), after)


def same_wait(timeline: Timeline, index: int) -> bool:
    """Whether a request's first moment is the engine's, which looks at the clock a little earlier in the same step."""
    metrics, moments = timeline.outputs[index].metrics, timeline.moments[index]
    return metrics.time_to_first_token <= moments[0] < metrics.latency <= moments[-1]


def test_every_token_has_its_moment(llm: TimedLLM) -> None:
    requests = [short([1, 2, 3 + i], outputs) for i, outputs in enumerate((3, 1, 7, 2))]
    timeline = llm.serve(requests)
    assert [len(moments) for moments in timeline.moments] == [3, 1, 7, 2]
    assert all(0 < a < b <= timeline.seconds for m in timeline.moments for a, b in itertools.pairwise(m))
    assert timeline.peak_running == 2
    alone = llm.generate([r.prompt for r in requests], [r.params for r in requests], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in timeline.outputs] == [o.outputs[0].token_ids for o in alone]


def test_a_static_batch_waits_for_its_slowest(llm: TimedLLM) -> None:
    """Two rows: the third request fills the row that the first leaves, or waits for the second."""
    requests = [short([1, 2, 3], 2), short([4, 5, 6], 12), short([7, 8, 9], 2)]
    steps = []
    for batching in ("continuous", "static"):
        before = llm.stats().num_steps
        timeline = llm.serve(requests, batching=batching)
        steps.append(llm.stats().num_steps - before)
        waits = timeline.moments[2][0] > timeline.moments[1][-1]
        assert waits == (batching == "static")
        assert same_wait(timeline, 2)  # waiting for a batch counts
    assert steps == [12, 14]


def test_a_late_request_comes_when_the_others_have_so_many_tokens(llm: TimedLLM) -> None:
    timeline = llm.serve([short([1, 2, 3], 9), short([9, 8, 7, 6], 3, after=4)])
    first, late = timeline.outputs
    began = [first.metrics.arrival_time + moment for moment in timeline.moments[0]]
    assert began[3] <= late.metrics.arrival_time < began[4]
    assert same_wait(timeline, 1)
    assert len(timeline.moments[1]) == 3


def test_what_is_refused_has_no_moments_and_holds_nobody_up(llm: TimedLLM) -> None:
    impossible = short([1] * (llm.max_model_len + 1), 2)
    for batching in ("continuous", "static"):
        timeline = llm.serve([impossible, impossible, short([4, 5], 2)], batching=batching)
        assert [output.error is None for output in timeline.outputs] == [False, False, True]
        assert [len(moments) for moments in timeline.moments] == [0, 0, 2]


def test_times_are_of_those_whom_they_concern() -> None:
    """Late: first tokens of the late request, times between tokens of the other."""
    moments = ((1.0, 2.0, 5.0), (0.5, 0.75))
    both = Served(((1, 1, 1), (1, 1)), 9, 5.0, moments)
    assert (both.ttft_s, both.tpot_s, both.gap_s) == ([1.0, 0.5], [2.0, 0.25], [1.0, 3.0, 0.25])
    late = Served(both.tokens, 9, 5.0, moments, late=frozenset({1}))
    assert (late.ttft_s, late.tpot_s, late.gap_s) == ([0.5], [2.0], [1.0, 3.0])
    assert summarize_times([both, late])["gap_s"] == {"p50": 1.0, "p90": 3.0, "p99": 3.0}
    assert percentiles(range(1, 201)) == {"p50": 100, "p90": 180, "p99": 198}
    assert percentiles([]) is None


def test_static_and_continuous_batching_side_by_side(run: Run, plan: Callable[..., Plan], checkpoint: Path) -> None:
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)}, "scheduler": SMALL, "batching": ["continuous", "static"], "repeats": 1,
        "workload": {**SYNTHETIC, "output_len": {"uniform": [1, 12]}},
    }  # fmt: skip
    folder = run(**keys)
    assert failures(folder) == []
    continuous, static = rows_of(folder, "engine")
    assert [row.settings for row in (continuous, static)] == [{"batching": "continuous"}, {"batching": "static"}]
    assert static.steps > continuous.steps
    assert continuous.peak_running == 2
    for times in (static.ttft_s, static.tpot_s, static.gap_s):
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert [row.tokens_equal for row in rows_of(folder, "parity")] == [True]
    text = printed(plan(**keys), folder, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "batching static" in text


def test_no_round_finds_what_another_cached(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine serves a workload several times, the same prompts each time."""
    hits = []

    class Noting(TimedLLM):
        def serve(self, *args: Any, **kwargs: Any) -> Timeline:
            before = self.stats().prefix_cache.hit_tokens
            timeline = super().serve(*args, **kwargs)
            hits.append(self.stats().prefix_cache.hit_tokens - before)
            return timeline

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", Noting)
    run(
        model={"path": str(checkpoint)}, scheduler={**SMALL, "prefix_cache": "hash"}, repeats=2,
        workload=[{**SYNTHETIC, "name": "one"}, {**SYNTHETIC, "name": "two"}],
    )  # fmt: skip
    assert hits == [0] * 8  # of each workload the answer, the warm-up, two rounds


def test_hits_are_of_what_prompts_share(run: Run, checkpoint: Path) -> None:
    """Five requests of 20 tokens in pages of 8, 15 shared: a page of each but the first two, which run at once."""
    folder = run(
        model={"path": str(checkpoint)}, scheduler={**SMALL, "prefix_cache": ["none", "hash", "radix"]}, repeats=2,
        workload=[{**SYNTHETIC, "name": "own"}, {**SYNTHETIC, "name": "shared", "shared_prefix": 0.75}],
    )  # fmt: skip
    assert failures(folder) == []
    hits = {(row.workload, row.settings["prefix_cache"]): row.hit_tokens for row in rows_of(folder, "engine")}
    assert [hits["own", name] for name in ("none", "hash", "radix")] == [0, 0, 0]
    assert hits["shared", "none"] == 0
    assert hits["shared", "hash"] == hits["shared", "radix"] == 3 * 8
    assert all(row.tokens_equal for row in rows_of(folder, "parity"))


def test_sets_of_options_that_only_go_together(run: Run, tmp_path: Path, checkpoint: Path) -> None:
    late = {"num_requests": 2, "input_len": 40, "output_len": 3, "every": 3}
    whole = {**SMALL, "max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64, "chunked_prefill": False}
    chunks = {**whole, "max_num_batched_tokens": 16, "chunked_prefill": True}
    folder = run(
        model={"path": str(checkpoint)}, scheduler=[whole, chunks], repeats=1,
        workload={**SYNTHETIC, "output_len": 12, "late": late},
    )  # fmt: skip
    assert failures(folder) == []
    again = make_plan(read_document(folder.path / "resolved.yaml"))
    assert again.arms == make_plan(read_document(tmp_path / "experiment.yaml")).arms
    off, on = rows_of(folder, "engine")
    assert off.settings == {"max_num_batched_tokens": 64, "chunked_prefill": False}
    assert on.settings == {"max_num_batched_tokens": 16, "chunked_prefill": True}
    assert on.steps > off.steps
    assert off.requests == 7
    assert [row.tokens_equal for row in rows_of(folder, "parity")] == [True]


def test_the_peer_without_a_cache_says_the_same(run: Run, checkpoint: Path) -> None:
    folder = run(
        model={"path": str(checkpoint)}, scheduler=SMALL, peers=["without_kv_cache"], repeats=1,
        workload={**SYNTHETIC, "input_len": {"uniform": [2, 20]}, "output_len": {"uniform": [1, 6]}},
    )  # fmt: skip
    assert failures(folder) == []
    (beside,) = rows_of(folder, "speedup")
    assert beside.tokens_equal
    assert beside.requests_equal == 5
    assert beside.speedup_of == "one replicate"
    (row,) = rows_of(folder, "peers")
    assert row.ttft_s["p50"] > 0
    assert row.gap_s["p99"] > 0


@pytest.mark.parametrize("peer", ["without_kv_cache", "transformers_batched"])
def test_a_peer_serves_no_late_requests(run: Run, checkpoint: Path, peer: str) -> None:
    late = {"num_requests": 1, "input_len": 4, "output_len": 3, "every": 3}
    folder = run(
        model={"path": str(checkpoint)}, scheduler=SMALL, peers=[peer], repeats=1, workload={**SYNTHETIC, "late": late}
    )
    (row,) = rows_of(folder, "peers")
    assert (row.status, row.reason) == ("unsupported", "only requests that come at once are compared")
