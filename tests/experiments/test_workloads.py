"""Requests that are not all alike: priorities, several completions of one, tenants, and what they do to a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.document import ExperimentError, read_document
from experiments.planning.plan import make_sweep
from experiments.planning.requests import requests_of
from experiments.runs.folder import RunFolder
from experiments.schema import TraceWorkload
from experiments.serving.requests import Request
from experiments.stages.timed_llm import TimedLLM
from experiments.sweep.runner import failures
from tests.experiments.planning.single_plan import make_plan
from tests.experiments.test_baselines import SMALL, SYNTHETIC, rows_of, workload
from tsched import SamplingParams

Run = Callable[..., RunFolder]


def test_priorities_are_one_each_or_drawn_and_change_no_prompt() -> None:
    plain = requests_of(workload(), 1000)
    assert [request.priority for request in plain] == [0] * 5
    each = requests_of(workload(priority=[4, -1, 0, 2, 3]), 1000)
    assert [request.priority for request in each] == [4, -1, 0, 2, 3]
    drawn = requests_of(workload(num_requests=100, priority={"uniform": [-1, 1]}), 1000)
    assert {request.priority for request in drawn} == {-1, 0, 1}
    assert [request.prompt for request in each] == [request.prompt for request in plain]
    late = {"num_requests": 2, "input_len": 4, "output_len": 3, "every": 1, "priority": -7}
    found = requests_of(workload(priority=1, late=late), 1000)
    assert [request.priority for request in found] == [1] * 5 + [-7] * 2


def test_tenants_take_turns_and_n_is_the_samplers() -> None:
    found = requests_of(workload(tenants=2, n=3, sampling={"temperature": 0.5}), 1000)
    assert [request.tenant for request in found] == [0, 1, 0, 1, 0]
    assert {request.params.n for request in found} == {3}
    assert len({request.params.seed for request in found}) == 5


def test_an_order_by_priority_differs_from_first_come_first_served(run: Run, checkpoint: Path) -> None:
    """Two rows, and the last two of six requests are the urgent ones."""
    folder = run(
        model={"path": str(checkpoint)}, scheduler={**SMALL, "order": ["fcfs", "priority"]}, repeats=1,
        workload={**SYNTHETIC, "num_requests": 6, "priority": [1, 1, 1, 1, 0, 0], "output_len": 12},
    )  # fmt: skip
    assert failures(folder) == []
    assert [row.tokens_equal for row in rows_of(folder, "parity")] == [True]
    again = make_plan(read_document(folder.path / "resolved.yaml")).experiment.workload[0]
    assert again.priority is not None
    assert again.priority.each == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_the_urgent_are_served_first_where_the_order_says_so(checkpoint: Path, order: str) -> None:
    llm = TimedLLM(checkpoint, **SMALL, order=order)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    timeline = llm.serve([Request([1, 2, 3 + i], params, priority=rank) for i, rank in enumerate((1, 1, 1, 1, 0, 0))])
    waits = [moments[0] for moments in timeline.moments]
    assert (max(waits[4:]) < min(waits[:4])) == (order == "priority")
    assert (max(waits[:4]) < min(waits[4:])) == (order == "fcfs")


def test_every_completion_of_a_request_has_its_moments(checkpoint: Path) -> None:
    """The early request's three completions make its tokens come three times as fast, and no late one earlier."""
    llm = TimedLLM(checkpoint, **{**SMALL, "max_num_seqs": 4})
    params = SamplingParams(n=3, temperature=1.0, seed=0, max_tokens=9, ignore_eos=True)
    late = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    timeline = llm.serve([Request([1, 2, 3], params), Request([4, 5], late, after=4)])
    assert [len(moments) for moments in timeline.moments] == [9, 9, 9, 2]
    first, second = timeline.outputs
    assert len({tuple(completion.token_ids) for completion in first.outputs}) == 3
    began = [first.metrics.arrival_time + moments[3] for moments in timeline.moments[:3]]
    assert max(began) <= second.metrics.arrival_time < first.metrics.arrival_time + timeline.moments[0][5]
    impossible = Request([1] * (llm.max_model_len + 1), params)
    assert llm.serve([impossible]).moments == ((), (), ())


def test_several_completions_are_counted_timed_and_compared(run: Run, checkpoint: Path) -> None:
    folder = run(
        model={"path": str(checkpoint)}, scheduler={**SMALL, "prefix_cache": ["none", "radix"]}, repeats=1,
        workload={**SYNTHETIC, "n": 3, "sampling": {"temperature": 0.8}}, peers=["without_kv_cache"],
    )  # fmt: skip
    assert failures(folder) == []
    for row in rows_of(folder, "engine"):
        assert (row.requests, row.requests_failed) == (15, 0)
        assert (row.prompt_tokens, row.output_tokens) == (100, 15 * 6)
    (parity,) = rows_of(folder, "parity")
    assert (parity.requests, parity.requests_equal, parity.tokens_equal) == (15, 15, True)


def test_tenants_share_no_prefix(run: Run, checkpoint: Path) -> None:
    """Six requests of 24 tokens, 16 of them the same for all: two pages each that only the own tenant's may be."""
    hits = {}
    for tenants in (1, 2, 6):
        keys: dict[str, Any] = {**SYNTHETIC, "num_requests": 6, "input_len": 24, "shared_prefix": 0.7}
        scheduler = {**SMALL, "max_num_seqs": 1, "prefix_cache": "hash"}
        folder = run(
            model={"path": str(checkpoint)}, scheduler=scheduler, repeats=1, workload={**keys, "tenants": tenants}
        )
        (row,) = rows_of(folder, "engine")
        hits[tenants] = row.hit_tokens
        shutil.rmtree(folder.path)
    assert hits == {1: 5 * 16, 2: 4 * 16, 6: 0}


TRACE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 9, "input_length": 1100, "output_length": 513, "hash_ids": [0, 1, 3]},
    {"timestamp": 12, "input_length": 3, "output_length": 1, "hash_ids": [4]},
]


def write_trace(folder: Path, name: str = "trace.jsonl") -> dict[str, Any]:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return {"kind": "trace", "file": name, "block_tokens": 8}


def test_a_traces_prompts_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    written = write_trace(tmp_path)
    workload = TraceWorkload.model_validate({**written, "file": tmp_path / "trace.jsonl"})
    found = requests_of(workload, 1000)
    prompts = [request.prompt for request in found]
    assert [len(prompt) for prompt in prompts] == [24, 18, 1]  # 8 tokens for each 512, rounded up
    assert [request.params.max_tokens for request in found] == [1, 9, 1]
    assert prompts[0][:16] == prompts[1][:16]
    assert prompts[0][16:18] != prompts[1][16:18]
    assert found == requests_of(workload, 1000)
    assert requests_of(workload.model_copy(update={"num_requests": 2}), 1000) == found[:2]


def test_a_trace_is_a_workload_like_others(run: Callable[..., RunFolder], checkpoint: Path, tmp_path: Path) -> None:
    workload = {**write_trace(tmp_path), "num_requests": [1, 3]}
    scheduler = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 8, "kv_cache_bytes": 1 << 18}
    folder = run(model={"path": str(checkpoint)}, workload=workload, scheduler=scheduler, repeats=1)
    rows = [row for row in folder.rows if row.stage == "engine"]
    assert [(row.settings, row.prompt_tokens, row.output_tokens) for row in rows] == [
        ({"workload.num_requests": 1}, 24, 1), ({"workload.num_requests": 3}, 43, 11)
    ]  # fmt: skip
    again = make_sweep(read_document(folder.path / "resolved.yaml"))
    assert again.experiment.workload[0].file == tmp_path / "trace.jsonl"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "nowhere.jsonl"}, "nowhere.jsonl: No such file"),
        ({"file": "trace.txt"}, "the format follows from the suffix"),
        ({"file": "broken.jsonl"}, "line 2"),
        ({"num_requests": 4}, "4 of a trace of 3"),
        ({"block_tokens": 513}, "must be less than or equal to 512"),
        ({"block_tokens": 512}, "reach 1613 tokens, the model's length is 128"),
        ({"priority": [1, 2, 3]}, "a trace's requests have one priority"),
    ],
)
def test_a_trace_that_cannot_be_served_is_refused(
    change: dict[str, Any], message: str, write: Callable[..., Path], checkpoint: Path, tmp_path: Path
) -> None:
    written = write_trace(tmp_path)
    (tmp_path / "trace.txt").write_text("")
    (tmp_path / "broken.jsonl").write_text(json.dumps(TRACE[0]) + "\n{\n")
    file = write(model={"path": str(checkpoint)}, workload={**written, **change})
    with pytest.raises(ExperimentError, match=message):
        make_sweep(read_document(file))
