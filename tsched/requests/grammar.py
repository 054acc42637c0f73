"""Compiles the form that an output must have into a grammar over tokens, by llguidance.

A few hundred characters can keep a compiler busy for minutes, and a thread cannot be ended. So a process of its own
reads each grammar first, within a second; what it could read is compiled here too, which takes as long again.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsched.requests.errors import RefusedError
from tsched.requests.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_S = 1.0
_START_S = 60.0
_KEPT = 128  # compiled grammars
_WORDS = 300  # characters of a compiler's message that a refusal has
_LIMITS = {"precompute_large_lexemes": False, "verbose_errors": False}


class Grammar:
    """A compiled grammar, from which each output starts.

    Args:
        matcher: As at the start of an output.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """Starts an output."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """How far an output has come in its grammar.

    Attributes:
        matcher: llguidance's, which computes masks.
    """

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the grammar gives up; None where it does not."""
        return f"structured_outputs: {_first_line(self.matcher.get_error())}" if self.matcher.is_error() else None

    def append(self, token_id: int) -> bool:
        """Goes on by an output token. Sets `error` where the grammar does not allow it.

        Returns:
            Whether no token may follow, but one that ends the output.
        """
        self.matcher.consume_token(token_id)
        return self.matcher.is_stopped()


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Any thread may call it.

    Args:
        tokenizer: Transformers', a fast one; None where there is none.
        vocab_size: The model's.
        eos_token_ids: The tokens that may end an output where its grammar may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens: Any = None  # llguidance's form of the tokenizer
        self._reader: _Reader | None = None
        self._compiled: dict[tuple[str, str], Grammar] = {}  # the least recently used first
        self._lock = threading.Lock()

    def start(self, form: StructuredOutputsParams) -> Future[Grammar | str]:
        """Begins to compile the grammar of `form` on a thread: the caller need not wait.

        Returns:
            The grammar, or why it is refused. An exception would keep all that its traceback refers to.
        """
        future: Future[Grammar | str] = Future()

        def run() -> None:
            future.set_result(self._try(form))

        if form.definition in self._compiled:  # or was, until now
            run()
        else:
            threading.Thread(target=run, name="grammar compiler", daemon=True).start()
        return future

    def _try(self, form: StructuredOutputsParams) -> Grammar | str:
        try:
            return self.compile(form)
        except RefusedError as error:
            return str(error)
        except Exception as error:  # its process died, say
            return f"structured_outputs cannot be compiled: {type(error).__name__}: {error}"

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """Compiles the grammar of `form`, or finds it among the last ones.

        Raises:
            RefusedError: It is wrong, too large, takes too long, or cannot be served here. The message has its field.
        """
        definition = form.definition
        with self._lock:
            grammar = self._compiled.pop(definition, None)
            if grammar is None:
                grammar = self._compile(f"structured_outputs.{form.field}", definition)
            self._compiled[definition] = grammar
            if len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
        return grammar

    def _compile(self, name: str, definition: tuple[str, str]) -> Grammar:
        try:
            llguidance = import_module("llguidance")
        except ImportError:
            raise RefusedError(f"{name} needs llguidance: pip install 'tkernels[serve]'") from None
        if self._reader is None:
            self._reader = _Reader()
        text, error = self._reader.read(definition)
        if error:
            raise RefusedError(f"{name} is refused: {_first_line(error)}")
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._read_tokenizer(name), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RefusedError(f"{name} is refused: {_first_line(matcher.get_error())}")
        return Grammar(matcher)

    def _read_tokenizer(self, name: str) -> Any:
        if self._tokens is None:
            if self._tokenizer is None:
                raise RefusedError(f"{name} is a form of text, and there is no tokenizer to make it")
            ends = list(self._eos_token_ids) or None
            try:
                self._tokens = import_module("llguidance.hf").from_tokenizer(self._tokenizer, self._vocab_size, ends)
            except Exception as error:  # whatever llguidance finds wrong with it
                raise RefusedError(f"{name} cannot be served with this tokenizer: {_first_line(str(error))}") from error
        return self._tokens


class _Reader:
    """The process that reads grammars first. It ends with this object, or with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def read(self, definition: tuple[str, str]) -> tuple[str, str]:
        """Reads (format, text): (llguidance's grammar, why it is none or "")."""
        process = self._process
        if process is None or process.poll() is not None:  # something else may have killed it
            self._stop()
            process = self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(definition) + "\n")
        process.stdin.flush()
        line = self._read_line(process, COMPILE_S)
        if line is None:
            self._stop()
            return "", f"it takes more than {COMPILE_S:g} s to compile"
        if not line:
            self._stop()
            return "", "it takes too much memory to compile"
        grammar, error = json.loads(line)
        return grammar, error

    def _start(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("grammar_process.py")
        process = subprocess.Popen(
            # -P: the files beside the program are no modules. A session of its own: Ctrl-C is not for it.
            [sys.executable, "-P", str(program), json.dumps(_LIMITS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self._process, self._end = process, weakref.finalize(self, _end_process, process)
        if self._read_line(process, _START_S) != "ready\n":
            self._stop()
            raise RefusedError("structured_outputs cannot be served: the process that reads grammars did not start")
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    @staticmethod
    def _read_line(process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line of the process, "" where it has ended; None where none comes in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(seconds) else None


def _end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # of a line that it never read
                pipe.close()


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:_WORDS]
