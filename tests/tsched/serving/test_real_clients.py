"""The comparison with lm-eval's log bites; `python -m tests.tsched.serving.real_clients` runs lm-eval itself."""

import random
from typing import Any

from tests.tsched.serving.real_clients import LARGEST_DIFFERENCE, compare_documents


def score(context: str, end: str) -> tuple[float, bool]:
    return -float(len(end)), end == "a"


def log(shift: float = 0.0, *, is_random: bool = False, flips: bool = False) -> list[dict[str, Any]]:
    """What lm-eval writes of three documents, each with the ends "a", "bb" and "ccc"."""
    drawn = random.Random(0)
    arguments = {f"gen_args_{place}": {"arg_0": "begin", "arg_1": end} for place, end in enumerate(("a", "bb", "ccc"))}
    scores = [score(one["arg_0"], one["arg_1"]) for one in arguments.values()]
    found = [
        [[str(drawn.uniform(-9, 0) if is_random else total + shift), str(is_greedy != flips)]]
        for total, is_greedy in scores
    ]
    return [{"arguments": arguments, "resps": found, "target": "0", "acc": 1.0}] * 3


def test_what_is_not_transformers_is_said() -> None:
    assert compare_documents(log(LARGEST_DIFFERENCE / 2), score)[1] == []
    assert "log-likelihood differs by" in compare_documents(log(LARGEST_DIFFERENCE * 2), score)[1][0]
    assert "log-likelihood differs by" in compare_documents(log(is_random=True), score)[1][0]
    assert compare_documents(log(flips=True), score)[1] == ["9 greedy flags differ"]
    wrong = [{**one, "acc": 0.5} for one in log()]
    assert compare_documents(wrong, score)[1] == ["the accuracy is not transformers'"]
