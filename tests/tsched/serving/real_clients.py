"""Clients that others wrote, unchanged, against `tk serve`: they end without an error, and their numbers are ours.

python -m tests.tsched.serving.real_clients FOLDER [--model tiny] [--only NAME ...] [--vllm-benchmark SCRIPT]

FOLDER keeps the clients' environments (pip installs them, and an index must be in reach) and what they wrote. SCRIPT is
benchmarks/benchmark_serving.py of a vLLM checkout, with the files beside it. Of each client it is printed what it
counted, and what was compared: with the server's /metrics, and lm-eval's log-likelihoods with transformers' in float32.
OpenAI's own client is in this project's environment: test_openai_clients.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.environments import make_environment, run_command
from tests.tsched.serving.tk_serve import Served, serving

LARGEST_DIFFERENCE = 1e-3
"""Of a choice's log-likelihood, in nats, between lm-eval over HTTP and transformers."""


def run_guidellm(served: Served, python: Path) -> list[str]:
    """Concurrent synthetic chats; its counts of requests and tokens are the server's."""
    count, outputs, report = 40, 16, served.folder / "guidellm.json"
    before = served.count()
    done = run_command(
        [
            python.with_name("guidellm"), "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={served.base}",
            "--profile", "kind=concurrent,streams=8",
            "--constraint", f"kind=max_requests,count={count}",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={outputs}",
            "--tokenizer", f"kind=hf_auto,model={served.directory}",
            "--output", f"kind=json,path={report}",
        ]
    )  # fmt: skip
    if done.returncode:
        return [f"it failed:\n{done.stderr[-2000:]}"]
    after = served.count()
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    prompts = metrics["prompt_token_count"]["successful"]["total_sum"]
    print(f"guidellm: {totals}, {tokens:,.0f} output tokens, {prompts:,.0f} prompt tokens")
    faults = [] if totals["successful"] == count and not totals["errored"] else [f"requests: {totals}"]
    counted = {
        "vllm:request_success_total": count,
        "vllm:generation_tokens_total": tokens,
        "vllm:prompt_tokens_total": prompts,
    }
    faults += [
        f"{name} rose by {after[name] - before[name]:,.0f}, and guidellm counts {theirs:,.0f}"
        for name, theirs in counted.items()
        if after[name] - before[name] != theirs
    ]
    if tokens != count * outputs:
        faults.append(f"{tokens} output tokens of {count} requests for {outputs}")
    return faults


def run_vllm_benchmark(served: Served, python: Path, script: Path) -> list[str]:
    """vLLM's serving benchmark with random prompts; every request completes."""
    count, outputs, name = 40, 16, "vllm-benchmark.json"
    before = served.count()
    done = run_command(
        [
            python, script, "--backend", "vllm", "--base-url", served.base, "--model", "served",
            "--tokenizer", served.directory, "--dataset-name", "random", "--random-input-len", 32,
            "--random-output-len", outputs, "--num-prompts", count, "--ignore-eos", "--save-result",
            "--result-dir", served.folder, "--result-filename", name,
        ]
    )  # fmt: skip
    if done.returncode:
        return [f"it failed:\n{done.stderr[-2000:]}"]
    after, result = served.count(), json.loads((served.folder / name).read_text())
    failed = [error for error in result.get("errors", ()) if error]
    print(
        f"vLLM's benchmark: {result['completed']} of {count} completed, mean TTFT {result['mean_ttft_ms']:.1f} ms, "
        f"mean TPOT {result['mean_tpot_ms']:.1f} ms"
    )
    faults = [] if result["completed"] == count and not failed else [f"{result['completed']} completed: {failed[:1]}"]
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    if made != (count + 1) * outputs:  # it sends one request before it begins
        faults.append(f"the server counts {made:,.0f} tokens of {count + 1} requests for {outputs}")
    return faults


def run_lm_eval(served: Served, python: Path) -> list[str]:
    """A multiple choice of its own over /v1/completions; log-likelihoods and accuracy are transformers'."""
    task, out = served.folder / "task", served.folder / "lm-eval"
    write_task(task)
    told = (
        f"model=served,base_url={served.base}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_length=256"
    )
    done = run_command(
        [
            python.with_name("lm_eval"), "--model", "local-completions", "--model_args", told, "--include_path", task,
            "--tasks", "continue_line", "--log_samples", "--output_path", out,
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(served.folder / "datasets")},
    )  # fmt: skip
    if done.returncode:
        return [f"it failed:\n{done.stderr[-2000:]}"]
    samples = max(out.rglob("samples_continue_line_*.jsonl"), key=lambda file: file.stat().st_mtime)
    documents = [json.loads(line) for line in samples.read_text().splitlines()]
    line, faults = compare_documents(documents, score_by_transformers(served.directory))
    print(line)
    return faults


def compare_documents(
    documents: Sequence[Any], score: Callable[[str, str], tuple[float, bool]]
) -> tuple[str, list[str]]:
    """What lm-eval logged beside another's scores: (a line, what differs)."""
    largest, unlike, right = 0.0, 0, 0
    for document in documents:
        pairs = [(one["arg_0"], one["arg_1"]) for one in document["arguments"].values()]
        theirs = [(float(total), said == "True") for ((total, said),) in document["resps"]]
        ours = [score(*pair) for pair in pairs]
        largest = max(largest, *(abs(one - other) for (one, _), (other, _) in zip(theirs, ours, strict=True)))
        unlike += sum(one != other for (_, one), (_, other) in zip(theirs, ours, strict=True))
        best = max(range(len(ours)), key=lambda place: ours[place][0])
        right += best == int(document["target"])
    accuracy = sum(document["acc"] for document in documents) / len(documents)
    line = (
        f"lm-eval: {len(documents)} documents, accuracy {accuracy:.3f} (transformers' {right / len(documents):.3f}), "
        f"largest difference of a log-likelihood {largest:.1e}, {unlike} of its greedy flags differ"
    )
    faults = [] if largest <= LARGEST_DIFFERENCE else [f"a log-likelihood differs by {largest:.1e}"]
    faults += [f"{unlike} greedy flags differ"] if unlike else []
    return line, faults + ([] if accuracy == right / len(documents) else ["the accuracy is not transformers'"])


def write_task(folder: Path) -> None:
    """A task that asks which of four ends a line of Python's own sources has."""
    folder.mkdir(exist_ok=True)
    source = Path(os.__file__).with_name("inspect.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in source.splitlines() if re.fullmatch(r"\s+\w+ .{20,60}", line)]
    drawn = random.Random(0).sample(lines, 160)
    documents = []
    for place in range(0, len(drawn), 4):
        parts = [line.partition(" ") for line in drawn[place : place + 4]]
        documents.append({"begin": parts[0][0], "ends": [end for _, _, end in parts], "gold": 0})
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, documents)))
    # JSON is YAML.
    settings: Mapping[str, Any] = {
        "task": "continue_line", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(folder / "lines.jsonl")}}, "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}", "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (folder / "continue_line.yaml").write_text(json.dumps(settings))


def score_by_transformers(directory: Path) -> Callable[[str, str], tuple[float, bool]]:
    """What scores a continuation as lm-eval does: the sum of log-probabilities, and whether it is the greedy one."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def score(context: str, continuation: str) -> tuple[float, bool]:
        start = len(tokenizer(context)["input_ids"])
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])  # [1, T]
        with torch.no_grad():
            logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)  # [T - start, V]
        targets = ids[0, start:]
        chosen = logprobs.gather(1, targets[:, None])
        return float(chosen.sum()), bool((logprobs.argmax(-1) == targets).all())

    return score


def main() -> int:
    """1 where a client failed, was not made, or counts otherwise than we."""
    requirements = {
        "guidellm": ("guidellm",),
        "lm-eval": ("lm-eval[api]",),
        "vllm-benchmark": ("aiohttp", "datasets", "numpy", "pandas", "pillow", "tqdm", "transformers"),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--only", nargs="+", choices=list(requirements), default=list(requirements))
    parser.add_argument("--vllm-benchmark", type=Path, metavar="SCRIPT")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[[Served, Path], list[str]]] = {"guidellm": run_guidellm, "lm-eval": run_lm_eval}
    if asked.vllm_benchmark is not None:
        runs["vllm-benchmark"] = lambda served, python: run_vllm_benchmark(served, python, asked.vllm_benchmark)
    bad = 0
    with serving(asked.model, folder) as served:
        for name in asked.only:
            python = make_environment(folder / "environments" / name, requirements[name]) if name in runs else None
            faults = ["not run: it does not install here, or no script was given"]
            if python is not None:
                faults = runs[name](served, python)
            bad += bool(faults)
            for fault in faults:
                print(f"{name}: {fault}", flush=True)
    print(f"{len(asked.only) - bad} of {len(asked.only)} clients end without an error, with our numbers")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
