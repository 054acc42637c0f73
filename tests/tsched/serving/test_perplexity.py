"""A perplexity from the log-probabilities of echoed prompts is `tk eval`'s."""

from pathlib import Path

import pytest

from tests.tsched.conftest import TEXT
from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.perplexity import LARGEST_DIFFERENCE, ask_nats, cut, eval_nats
from tsched.serving.responses import CompletionWriter


def test_perplexity_over_http_is_tk_evals(
    server: RunningServer, chat_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    windows = cut(text, chat_checkpoint, 23)
    expected, count = eval_nats(chat_checkpoint, text, 23)
    assert count == 23 * len(windows) > 100
    assert abs(ask_nats(server.port, "random", windows) - expected) <= LARGEST_DIFFERENCE
    add = CompletionWriter.add_prompt

    def shift(self: CompletionWriter, scores: list) -> None:
        add(self, [None, *scores[2:], scores[1]])
        self._prompt_scores[-1] = self._prompt_scores[-2]

    monkeypatch.setattr(CompletionWriter, "add_prompt", shift)
    assert abs(ask_nats(server.port, "random", windows) - expected) > LARGEST_DIFFERENCE, "a fault is noticed"
