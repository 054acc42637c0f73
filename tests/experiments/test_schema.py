"""The structure of an experiment, and errors that say everything at once."""

from pathlib import Path

import pytest

from experiments.document import ExperimentError, parse_document
from experiments.planning.layout import lay_out
from experiments.schema import Experiment

GOOD = """
name: a
model: {preset: tiny}
kernels: {swiglu: fused}
"""

SYNTHETIC = "{kind: synthetic, num_requests: 2, input_len: 4, output_len: 8"
LATE = "{num_requests: 2, input_len: 4, output_len: 8"


def parse(text: str) -> Experiment:
    (layout,) = lay_out(parse_document(text, "a.yaml", Path()))
    return layout.experiment


def problems(text: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        parse(text)
    return list(caught.value.problems)


def test_every_problem_is_reported_at_once_with_its_place() -> None:
    found = problems(
        "name: a\nkernls: {}\nmodel: {presett: tiny}\ndtype: float23\n"
        "scheduler: {max_num_sequences: 4, block_size: 0}\n"
        "workload: {kind: synthetic, num_request: 4, input_len: 1, output_len: {uniform: [9, 8]}}\n"
    )
    expected = {
        "kernls (a.yaml, line 2, column 1): unknown key": "did you mean 'kernels'?",
        "model.presett (a.yaml, line 3, column 9): unknown key": "did you mean 'preset'?",
        "dtype (a.yaml, line 4, column 1): unknown value 'float23'": "did you mean 'float32'?",
        "scheduler.max_num_sequences (a.yaml, line 5, column 13): unknown key": "did you mean 'max_num_seqs'?",
        "scheduler.block_size (a.yaml, line 5, column 35)": "must be None or an integer of at least 1 and below 2**31",
        "workload.num_request (a.yaml, line 6, column 29): unknown key": "did you mean 'num_requests'?",
        "workload.num_requests (a.yaml, line 6, column 1)": "is required",
        "workload.output_len.uniform (a.yaml, line 6, column 72)": "the first bound is above the second",
    }
    for start, end in expected.items():
        (line,) = [line for line in found if line.startswith(start)]
        assert line.split("\n")[0].endswith(end) or end in line, line
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "seed: 18446744073709551616",
            "must be less than 18446744073709551616",
        ),
        (
            "workload: {kind: sythetic}",
            "kind 'sythetic': there is synthetic, prompts, trace, http; did you mean 'synthetic'?",
        ),
        (
            "workload: {kind: prompts, prompts: []}",
            "workload.prompts (a.yaml, line 5, column 27): must be a list of at least 1",
        ),
        (
            "workload: {kind: prompts, prompts: [3]}",
            "workload.prompts[0] (a.yaml, line 5, column 37): must be a text, got 3",
        ),
        ("workload: {}", "workload.kind (a.yaml, line 5, column 1): is required: there is synthetic, prompts"),
        (
            "model: /path",
            "model (a.yaml, line 4, column 1): a model is exactly one of {preset: NAME}, {path: DIRECTORY} and",
        ),
        ("model: random:Qwen3-0.6B", "got 'random:Qwen3-0.6B'; did you mean {preset: Qwen3-0.6B}?"),
        ("model: ..", "got '..'; did you mean {path: ..}?"),
        ("model: [tiny]", "got 'tiny'; did you mean {preset: tiny}?"),
        ("scheduler: 4", "scheduler (a.yaml, line 5, column 1): must be a mapping of keys to values, got 4"),
        (
            "shapes: {swiglu: [{T: {a: 1}}]}",
            "T (a.yaml, line 5, column 20): must be a whole number, true, false or a name, got",
        ),
        ("workload: {kind: prompts, prompts: [a], sampling: {temperatur: 1}}", "did you mean 'temperature'?"),
        ("workload: {kind: prompts, prompts: [a], sampling: {top_p: 2}}", "top_p must be above 0 and at most 1"),
        ("workload: {kind: prompts, prompts: [a], sampling: {logprobs: 3}}", "unknown key 'logprobs'"),
        ("workload: [{kind: prompts, prompts: [a]}, {kind: prompts, prompts: [b]}]", "needs a name of its own"),
        ("kernels: {swiglu: []}", "kernels.swiglu"),
        ("kernels: {swiglu: [{fused: {A: 1}, torch: {}}]}", "a variant is a name or {name: {config value: number}}"),
        ("kernels: {swiglu: {fused: {A: many}}}", "fused.A must be a number or a list of numbers, got 'many'"),
        ("repeats: 0", "repeats"),
        ("repeats: true", "repeats"),
        ("name: ../elsewhere", "name"),
        ("peers: [transformers_batched]", "peers serve a workload"),
        (
            "batching: sttic",
            "batching (a.yaml, line 5, column 1): unknown value 'sttic': there is continuous, static; did you",
        ),
        ("scheduler: []", "scheduler (a.yaml, line 5, column 1): must be a list of at least 1"),
        ("scheduler: [{}, {order: fcfs, block_size: 0}]", "scheduler[1].block_size"),
        (f"workload: {SYNTHETIC}, priority: [1, 2, 3]}}", "priority is a list of 3 for 2 requests: give one, or"),
        (
            f"workload: {SYNTHETIC}, priority: [1, a]}}",
            "workload.priority[1] (a.yaml, line 5, column 89): must be a whole number",
        ),
        (f"workload: {SYNTHETIC}, priority: []}}", "a priority is a whole number to +-2147483648, a list of one"),
        (f"workload: {SYNTHETIC}, priority: high}}", "a priority is a whole number to +-2147483648, a list"),
        (f"workload: {SYNTHETIC}, priority: {{uniform: [3, 1]}}}}", "a priority is a whole number to +-2147483648, a"),
        (f"workload: {SYNTHETIC}, priority: {{uniform: [0, 1], each: [1, 2]}}}}", "a priority is a whole number to"),
        (f"workload: {SYNTHETIC}, priority: 99999999999}}", "must be less than or equal to 2147483648"),
        (f"workload: {SYNTHETIC}, late: {LATE}, every: 1, priority: [1]}}}}", "priority is a list of 1 for 2 requests"),
        (
            f"workload: {SYNTHETIC}, n: 0}}",
            "workload.n (a.yaml, line 5, column 75): must be greater than or equal to 1, got 0",
        ),
        (f"workload: {SYNTHETIC}, n: 129, sampling: {{temperature: 1}}}}", "n must be from 1 to 128"),
        (f"workload: {SYNTHETIC}, tenants: 0}}", "workload.tenants (a.yaml, line 5, column 75): must be greater than"),
        ("workload: {kind: prompts, prompts: [a], priority: [1, 2]}", "priority is a list of 2 for 1 requests"),
        ("workload: {kind: prompts, prompts: [a], sampling: {n: 2}}", "unknown key 'n'"),
        (
            f"workload: {SYNTHETIC}, shared_prefix: 1.0}}",
            "shared_prefix (a.yaml, line 5, column 75): must be less than 1, got",
        ),
        (
            f"workload: {SYNTHETIC}, late: {LATE}, evry: 2}}}}",
            "late.evry (a.yaml, line 5, column 128): unknown key: there is num_",
        ),
        (f"workload: {SYNTHETIC}, late: {LATE}, every: 4}}}}", "comes after 8 output tokens of the others"),
        (f"batching: static\nworkload: {SYNTHETIC}, late: {LATE}, every: 3}}}}", "it goes with no late ones"),
    ],
)
def test_what_is_refused(change: str, message: str) -> None:
    key = change.partition(":")[0]
    kept = "".join(line + "\n" for line in GOOD.splitlines() if not line.startswith(f"{key}:"))
    found = problems(kept + change + "\n")
    assert any(message in line for line in found), found


@pytest.mark.parametrize("text", ["name: a", "name: a\nkernels: {}"])
def test_an_experiment_does_something(text: str) -> None:
    assert "nothing to do" in problems(text)[0]


def test_a_workload_needs_a_model() -> None:
    (problem,) = problems("name: a\nkernels: {swiglu: torch}\nworkload: {kind: prompts, prompts: [a]}")
    assert problem == "the experiment (a.yaml, line 1, column 1): a workload needs a model"


def test_a_model_is_exactly_one_of_three() -> None:
    (problem,) = problems("name: a\nmodel: {preset: tiny, path: b}")
    assert problem.startswith("model (a.yaml, line 2, column 1): a model is exactly one of")


def test_a_single_value_is_a_list_of_one() -> None:
    experiment = parse(GOOD + "scheduler: {block_size: 8}\nworkload: {kind: prompts, prompts: [a]}")
    assert [choice.variant for choice in experiment.kernels["swiglu"]] == ["fused"]
    assert experiment.scheduler[0].block_size == [8]
    assert [workload.kind for workload in experiment.workload] == ["prompts"]
