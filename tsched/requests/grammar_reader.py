"""Reads the form that an output must have in a process of its own, within a second.

A few hundred characters can keep a compiler of grammars busy for minutes, and a thread cannot be ended. Loads no torch.
"""

from __future__ import annotations

import json
import math
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tsched.requests.errors import RefusedError
from tsched.requests.structured_outputs import StructuredOutputsParams

COMPILE_S = 0.8  # so that a refusal takes less than a second
LIMITS = {"precompute_large_lexemes": False, "verbose_errors": False}
"""Of llguidance's LLParserLimits."""

KEPT = 128  # grammars
_START_S = 60.0
_REFUSED_S = 60.0  # for which a refusal is said again: who sends a slow form all day holds up no other forms
_WORDS = 300  # characters of a compiler's message that a refusal has
_REGEX_ERROR = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^+\nerror: (.*)")  # the regex, marked below, and why
_AROUND = 20  # characters of a wrong regex that are shown on each side of the fault


class GrammarReader:
    """Reads forms as llguidance's grammars, one after the other. Any thread may call it.

    What it reads has an output of bytes; whether a model's tokens can make it is asked later. Its process is started
    with the first form, and ends with this object or with this process.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], str] = {}
        self._refused: dict[tuple[str, str], tuple[float, str]] = {}  # when, why
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._is_ready = False
        self._lock = threading.Lock()

    def knows(self, form: StructuredOutputsParams) -> bool:
        """Whether `form` was read lately, so that `read` has its answer ready."""
        return form.definition in self._read or self._find_refusal(form.definition) is not None

    def _find_refusal(self, definition: tuple[str, str]) -> str | None:
        refused_at, why = self._refused.get(definition, (-math.inf, ""))
        return why if time.monotonic() - refused_at < _REFUSED_S else None

    def read(self, form: StructuredOutputsParams) -> str:
        """The grammar of `form`.

        Raises:
            RefusedError: It is wrong, too large, takes too long, or no output has it. The message begins with its name.
        """
        definition = form.definition
        known, refusal = self._read.get(definition), self._find_refusal(definition)
        if known is not None:
            return known
        if refusal is not None:
            raise refuse_form(form, refusal)
        with self._lock:
            if find_spec("llguidance") is None:
                raise RefusedError(f"{form.name} needs llguidance: pip install 'tkernels[serve]'")
            grammar, error = self._ask(definition)
            if error:
                _keep(self._refused, definition, (time.monotonic(), error))
                raise refuse_form(form, error)
            _keep(self._read, definition, grammar)
        return grammar

    def _ask(self, definition: tuple[str, str]) -> tuple[str, str]:
        """(llguidance's grammar, why it is none or "")."""
        process = self._wait_until_ready()
        assert process.stdin is not None
        process.stdin.write(json.dumps(definition) + "\n")
        process.stdin.flush()
        line = self._read_line(process, COMPILE_S)
        if line is None:
            self._start()  # the next form finds another
            return "", f"it takes more than {COMPILE_S:g} s to compile"
        if not line:
            self._stop()
            return "", "it takes too much memory to compile"
        grammar, error = json.loads(line)
        return grammar, error

    def _wait_until_ready(self) -> subprocess.Popen[str]:
        process = self._process
        if process is None or process.poll() is not None:  # something else may have killed it
            process = self._start()
        if not self._is_ready and self._read_line(process, _START_S) != "ready\n":
            self._stop()
            raise RefusedError("structured_outputs cannot be served: the process that reads grammars did not start")
        self._is_ready = True
        return process

    def _start(self) -> subprocess.Popen[str]:
        """Starts the process, in the place of one that there may be, and does not wait for it."""
        self._stop()
        program = Path(__file__).with_name("grammar_process.py")
        process = subprocess.Popen(
            # -P: the files beside the program are no modules. A session of its own: Ctrl-C is not for it.
            [sys.executable, "-P", str(program), json.dumps(LIMITS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self._process, self._end = process, weakref.finalize(self, _end_process, process)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None
        self._is_ready = False

    @staticmethod
    def _read_line(process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line of the process, "" where it has ended; None where none comes in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(seconds) else None


def refuse_form(form: StructuredOutputsParams, error: str) -> RefusedError:
    """The refusal of a form for an `error` of llguidance: its first line, or where a regex is wrong."""
    why = first_line(error)
    if found := _REGEX_ERROR.search(error):
        regex, before, fault = found.groups()
        near = regex[max(0, len(before) - _AROUND) : len(before) + _AROUND]
        why = f"{fault} at character {len(before) + 1} of a regex, in {near!r}"
    elif "coerce_one_of" in why:  # no option of ours
        why = "oneOf is not taken where a value might have two of its forms: write anyOf"
    if why == "NoExtensionBias":  # its word for an empty set of texts
        why = "no output has this form: what it asks for ends nowhere, or is nothing"
    return RefusedError(f"{form.name} is refused: {why}")


def _keep(found: dict[tuple[str, str], Any], definition: tuple[str, str], what: Any) -> None:
    """Keeps what was found of a form, and no more than KEPT of them, the last ones."""
    found.pop(definition, None)
    found[definition] = what
    if len(found) > KEPT:
        del found[next(iter(found))]


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:_WORDS]


def _end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # of a line that it never read
                pipe.close()
