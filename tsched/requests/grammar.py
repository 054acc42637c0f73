"""Compiles the form that an output must have into a grammar over a model's tokens, by llguidance.

What GrammarReader could read within a second is compiled here, on a thread, which takes as long again.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tsched.requests.errors import RefusedError
from tsched.requests.grammar_reader import KEPT, LIMITS, GrammarReader, first_line, refuse_form
from tsched.requests.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


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

    @cached_property
    def first_mask(self) -> bytes:
        """The tokens that an output may begin with: bit b of byte i says whether token 8 i + b is one."""
        return self._matcher.compute_bitmask()


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
        return f"structured_outputs: {first_line(self.matcher.get_error())}" if self.matcher.is_error() else None

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
        self._reader = GrammarReader()
        self._compiled: dict[tuple[str, str], Grammar] = {}  # the least recently used first
        self._waiting: dict[tuple[str, str], tuple[StructuredOutputsParams, Future[Grammar | str]]] = {}
        self._has_thread = False
        self._lock = threading.Lock()  # of these: nobody has it for long
        self._compiling = threading.Lock()

    def start(self, form: StructuredOutputsParams) -> Future[Grammar | str]:
        """Begins to compile the grammar of `form` on a thread: the caller does not wait.

        Returns:
            The grammar, or why it is refused; one for all who wait for the same form. An exception would keep all that
            its traceback refers to.
        """
        future: Future[Grammar | str] = Future()
        found = self._find(form.definition)
        if found is not None:
            future.set_result(found)
            return future
        with self._lock:
            _, future = self._waiting.setdefault(form.definition, (form, future))
            if not self._has_thread:
                threading.Thread(target=self._compile_waiting, name="grammar compiler", daemon=True).start()
                self._has_thread = True
        return future

    def _compile_waiting(self) -> None:
        """Compiles one form after the other, on one thread, which ends with the last."""
        while True:
            with self._lock:
                form, future = next(iter(self._waiting.values()), (None, None))
                self._has_thread = form is not None
            if form is None or future is None:
                return
            found = self._try(form)
            with self._lock:
                del self._waiting[form.definition]
            future.set_result(found)

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
        with self._compiling:
            grammar = self._find(definition) or self._compile(form)
        with self._lock:
            self._compiled[definition] = grammar
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
        return grammar

    def _find(self, definition: tuple[str, str]) -> Grammar | None:
        with self._lock:
            grammar = self._compiled.pop(definition, None)
            if grammar is not None:
                self._compiled[definition] = grammar
        return grammar

    def _compile(self, form: StructuredOutputsParams) -> Grammar:
        text = self._reader.read(form)
        llguidance = import_module("llguidance")
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._read_tokenizer(form.name), text, log_level=0, limits=limits)
        grammar = Grammar(matcher)
        begins = not matcher.is_error() and any(grammar.first_mask)
        if matcher.is_error():
            raise refuse_form(form, matcher.get_error())
        if not begins:
            raise refuse_form(form, "none of the model's tokens begins an output of this form")
        return grammar

    def _read_tokenizer(self, name: str) -> Any:
        if self._tokens is None:
            if self._tokenizer is None:
                raise RefusedError(f"{name} is a form of text, and there is no tokenizer to make it")
            ends = list(self._eos_token_ids) or None
            try:
                self._tokens = import_module("llguidance.hf").from_tokenizer(self._tokenizer, self._vocab_size, ends)
            except Exception as error:  # whatever llguidance finds wrong with it
                raise RefusedError(f"{name} cannot be served with this tokenizer: {first_line(str(error))}") from error
        return self._tokens
