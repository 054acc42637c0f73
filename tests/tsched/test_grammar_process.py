"""The program tsched.requests.grammar_process: what it answers to each line."""

from __future__ import annotations

import json
import subprocess
import sys

from tsched.requests import grammar_process
from tsched.requests.grammar_reader import LIMITS

ASKED = [
    # format, text, how the error begins
    ("regex", "a+", ""),
    ("regex", "(", "at 1(8): invalid regex"),
    ("json_schema", '{"type": "wizard"}', "Invalid type: wizard"),
    ("lark", "start: nowhere", "at 1(8): unknown name"),
    ("regex", r"[^\s\S]", "NoExtensionBias"),
    ("xml", "a", "ValueError: Unknown grammar type"),
    ("json_schema", '{"type": "object"}', ""),
]


def test_each_line_is_answered_by_its_grammar_or_its_error() -> None:
    told = subprocess.run(
        [sys.executable, "-P", grammar_process.__file__, json.dumps(LIMITS)], check=True, capture_output=True,
        text=True, input="".join(json.dumps(one[:2]) + "\n" for one in ASKED), timeout=60,
    ).stdout.splitlines()  # fmt: skip
    assert told[0] == "ready"
    for (kind, _, why), line in zip(ASKED, told[1:], strict=True):
        grammar, error = json.loads(line)
        assert error.startswith(why) if why else error == ""
        assert bool(grammar) == (kind != "xml")
