"""Perplexity over HTTP, from the log-probabilities of echoed prompts as lm-eval asks for them, beside `tk eval`'s.

python -m tests.tsched.serving.perplexity FOLDER [--model tiny] [--text FILE] [--window 255]

Asked: both the same to 1e-4 nats. FILE is one of Python's own sources where it is not given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from experiments.cli import app
from experiments.quantization.evaluation import cut_windows
from experiments.quantization.texts import tokenize_text
from tests.tsched.serving.raw_http import ask, encode_request
from tests.tsched.serving.tk_serve import serving

LARGEST_DIFFERENCE = 1e-4
"""Of the mean negative log-likelihood, in nats, which is the relative difference of the perplexity."""


def cut(text: Path, directory: Path, window: int) -> list[list[int]]:
    """The windows that `tk eval` cuts, with their first tokens, of which nothing is predicted."""
    windows: list[list[int]] = cut_windows(tokenize_text(text.read_text(encoding="utf-8"), directory), window).tolist()
    return windows


def ask_nats(port: int, model: str, windows: Sequence[Sequence[int]]) -> float:
    """The mean negative log-likelihood of the windows' tokens but the first."""
    nats, count = 0.0, 0
    for window in windows:
        body = {"model": model, "prompt": window, "temperature": 0, "max_tokens": 0, "logprobs": 1, "echo": True}
        answer = asyncio.run(ask(port, encode_request("POST", "/v1/completions", body)))
        assert answer.status == 200, answer.body
        first, *scores = json.loads(answer.body)["choices"][0]["logprobs"]["token_logprobs"]
        assert first is None
        assert len(scores) == len(window) - 1
        nats, count = nats - math.fsum(scores), count + len(scores)
    return nats / count


def eval_nats(directory: Path, text: Path, window: int) -> tuple[float, int]:
    """(the mean, of how many tokens) by `tk eval`."""
    arguments = ["eval", "--model", str(directory), "--text", str(text), "--window", str(window), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    return found["nats"], found["num_tokens"]


def main() -> int:
    """1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", type=Path, default=Path(os.__file__).with_name("inspect.py"))
    parser.add_argument("--window", type=int, default=255)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with serving(asked.model, asked.folder) as served:
        http = ask_nats(served.port, "served", cut(asked.text, served.directory, asked.window))
        ours, count = eval_nats(served.directory, asked.text, asked.window)
    print(f"perplexity of {count:,} tokens: {math.exp(http):.6f} over HTTP, {math.exp(ours):.6f} by tk eval")
    print(f"{abs(http - ours):.1e} nats apart")
    return 0 if abs(http - ours) <= LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
