"""How the tokens of one request are chosen, and when it stops."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from tsched.requests.bad_words import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadWord
from tsched.requests.errors import ArgumentError
from tsched.requests.structured_outputs import StructuredOutputsParams
from tsched.requests.vllm_names import SAMPLING_NAMES, refuse_other_names
from tsched.torch_free import suggest_name

if TYPE_CHECKING:  # the scheduler reads this file, and loads no torch
    from tsched.requests.logits_processors import LogitsProcessor
    from tsched.requests.stopping import StoppingCriterion

MAX_SAMPLES = 128
MAX_LOGPROBS = 1000
MAX_STOPS = 1000
MAX_STOP_LENGTH = 1000
MAX_CALLBACKS = 64
MAX_BIAS = 100.0
MAX_BIASES = 1000
MAX_ALLOWED = 2**20
MAX_COUNT = 2**31 - 1  # of tokens, and the largest id: int64 holds sums of a few
MAX_PENALTY = 2.0**126  # float32 holds it and its reciprocal, so float64 holds any float32 logit times it

# A greedy request's sampler need not look at parameters of draws, of prompts, nor at those of the output's end. It
# looks at a new parameter until that is put here.
_OF_DRAWS = frozenset({"n", "temperature", "top_k", "top_p", "min_p", "seed"})
_OF_PROMPTS = frozenset({"prompt_logprobs", "truncate_prompt_tokens"})
_OF_TEXT = frozenset({"include_stop_str_in_output", "skip_special_tokens"})
_OF_ENDS = frozenset({"stop", "stop_token_ids", "max_tokens", "ignore_eos", "stopping_criteria"})


class Asks(IntFlag):
    """What a request asks of the sampler, beside a draw, that others do not."""

    PROCESSORS = 1
    BIAS = 2
    PENALTIES = 4
    MIN_TOKENS = 8
    ALLOWED = 16
    BAD_WORDS = 32
    LOGPROBS = 64
    GRAMMAR = 128


@refuse_other_names(SAMPLING_NAMES)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request; immutable. Names and meanings are vLLM's.

    They apply in this order: logits processors, logit_bias, penalties, what bars tokens (min_tokens, allowed_token_ids,
    bad_words, structured_outputs), temperature, min_p, top_k, top_p.

    Attributes:
        n: In [1, 128], completions per prompt. Completion 0 draws from `seed`, completion i from a seed derived from
            (seed, i). Where temperature is 0 they are equal.
        temperature: At least 0. 0 is greedy and ignores top_k, top_p, min_p and seed.
        top_k: Below 2**31, keeps the k most likely tokens (ties go to the lower id); 0 or -1 keeps all.
        top_p: In (0, 1], keeps the fewest most likely tokens whose probabilities reach top_p.
        min_p: In [0, 1], keeps tokens at least min_p times as likely as the most likely one.
        repetition_penalty: In [2**-126, 2**126], divides positive and multiplies negative logits of tokens in the
            prompt or the output.
        presence_penalty: In [-2, 2], subtracted once from the logit of every token in the output.
        frequency_penalty: In [-2, 2], subtracted once per occurrence in the output.
        seed: In [0, 2**64). None takes a stream of its own from the engine's seed.
        logprobs: In [0, 1000], reports the log-probabilities of the chosen token and of that many most likely tokens.
        prompt_logprobs: In [0, 1000], reports the same for every token of the prompt from the second on. Such a request
            reads no cached prefix.
        truncate_prompt_tokens: In [1, 2**31), keeps the last so many tokens of the prompt; None keeps all.
        stop: Up to 1000 strings of up to 1000 characters that end the output. The text is cut off before them.
        stop_token_ids: Up to 1000 token ids below 2**31 that end the output and stay in its token_ids.
        max_tokens: In [1, 2**31) output tokens, or 0 with prompt_logprobs. None is as many as the model's length and
            the cache allow.
        include_stop_str_in_output: Whether the text goes on to the end of the stop string, and has the text of the
            token that ended the output. Without it the text ends before either.
        skip_special_tokens: Whether special tokens have no text.
        min_tokens: At most max_tokens. No end-of-sequence token, stop token or stop string ends the output before. It
            does not go with structured_outputs, which say themselves where an output may end.
        ignore_eos: Whether the output goes on after the model's end-of-sequence token.
        logit_bias: Up to 1000 token ids, each with a number in [-100, 100] that is added to its logit. Ids must be in
            the model's vocabulary, here and in what follows.
        allowed_token_ids: Up to 2**20, one at least: no other token is chosen. None is all tokens.
        bad_words: Texts, or lists of up to 64 token ids, that never stand in the output: the last token of one is
            barred where the output ends with those before it. A text stands for its tokens at the start of an output
            and, where they are as many, after a space. Up to 512, where a text counts for two.
        structured_outputs: The form that the output must have, StructuredOutputsParams or a mapping of its fields. An
            output that has come to the end of its form ends there, whatever ignore_eos.
        logits_processors: Up to 64, called in this order with the model's logits, see
            tsched.requests.logits_processors.
        stopping_criteria: Up to 64, any of which may end the output after min_tokens, see tsched.requests.stopping.

    Raises:
        ArgumentTypeError: There is no such field. The message has the nearest one, or what vLLM's is here.
        ArgumentError: A field is wrong. The message has its name.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[BadWord] | None = ()
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Iterable[LogitsProcessor] = ()
    stopping_criteria: Iterable[StoppingCriterion] = ()

    def __post_init__(self) -> None:
        self._set_integer("n", 1, MAX_SAMPLES)
        self._set_float("temperature", 0.0, math.inf)
        self._set_float("top_p", 0.0, 1.0, above=True)
        self._set_float("min_p", 0.0, 1.0)
        self._set_float("repetition_penalty", 0.0, math.inf, above=True)
        self._set_float("repetition_penalty", 1.0 / MAX_PENALTY, MAX_PENALTY)
        self._set_float("presence_penalty", -2.0, 2.0)
        self._set_float("frequency_penalty", -2.0, 2.0)
        self._set_integer("top_k", -1)
        self._set_integer("seed", 0, 2**64 - 1, optional=True)
        self._set_integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._set_integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._set_integer("truncate_prompt_tokens", 1, optional=True)
        self._set_integer("max_tokens", 1 if self.prompt_logprobs is None else 0, optional=True)
        self._set_integer("min_tokens", 0, MAX_COUNT if self.max_tokens is None else self.max_tokens)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _check_strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _check_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed:
                raise ArgumentError("allowed_token_ids must hold one token id at least; None allows all")
        object.__setattr__(self, "structured_outputs", _read_form(self.structured_outputs))
        if self.min_tokens and self.structured_outputs is not None:
            what = "does not go with structured_outputs, where an output ends with its form"
            raise ArgumentError(f"min_tokens {what}: say it there, as minLength, minItems or {{n,}}")
        object.__setattr__(self, "bad_words", _check_bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _check_callbacks("logits_processors", self.logits_processors, 3))
        object.__setattr__(self, "stopping_criteria", _check_callbacks("stopping_criteria", self.stopping_criteria, 2))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as checked: a tuple of strings."""
        return self.stop  # type: ignore[return-value]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as checked: a tuple of distinct ids."""
        return self.stop_token_ids  # type: ignore[return-value]

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias` as checked."""
        return self.logit_bias or {}

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """`allowed_token_ids` as checked: a tuple of distinct ids."""
        return self.allowed_token_ids  # type: ignore[return-value]

    @property
    def forbidden(self) -> tuple[BadWord, ...]:
        """`bad_words` as checked: a tuple of texts and tuples."""
        return self.bad_words  # type: ignore[return-value]

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """`bad_words` where all of them are tokens, as they are in an engine."""
        return self.bad_words  # type: ignore[return-value]

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """`logits_processors` as checked: a tuple."""
        return self.logits_processors  # type: ignore[return-value]

    @property
    def criteria(self) -> tuple[StoppingCriterion, ...]:
        """`stopping_criteria` as checked: a tuple."""
        return self.stopping_criteria  # type: ignore[return-value]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether every token is the one of the model's largest logit, and nothing else is asked of the sampler."""
        return self.is_greedy and bool(_get_heeded(self) == _HEEDED_UNSET)

    @property
    def ends_by_length(self) -> bool:
        """Whether the output ends at max_tokens and never before."""
        return self.ignore_eos and all(getattr(self, name) == _UNSET[name] for name in _EARLY_ENDS)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def asks(self) -> int:
        """The Asks of this request."""
        if _get_heeded(self) == _HEEDED_UNSET:  # as of most: a flag's arithmetic costs more than all else here
            return 0
        return int(
            Asks.PROCESSORS * bool(self.processors)
            | Asks.BIAS * bool(self.biases)
            | Asks.PENALTIES * self.has_penalties
            | Asks.MIN_TOKENS * (self.min_tokens > 0)
            | Asks.ALLOWED * (self.allowed_token_ids is not None)
            | Asks.BAD_WORDS * bool(self.bad_words)
            | Asks.LOGPROBS * (self.logprobs is not None)
            | Asks.GRAMMAR * (self.structured_outputs is not None)
        )

    def derive_sample_params(self, index: int) -> SamplingParams:
        """The parameters of completion `index` alone, with n = 1.

        Completion 0 keeps the seed. Later ones derive theirs from (seed, index) by numpy's SeedSequence. Without a seed
        each completion takes a stream from the engine's seed.
        """
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None and index > 0:
            seed = int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0])
        return replace(self, n=1, seed=seed)

    def _set_float(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        allowed = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:  # an int larger than any float
            number = math.inf
        if not math.isfinite(number):
            raise ArgumentError(f"{name} must be a finite number {allowed}, got {value!r}")
        if not (low < number if above else low <= number) or number > high:
            raise ArgumentError(f"{name} must be {allowed}, got {value!r}")
        object.__setattr__(self, name, number)

    def _set_integer(self, name: str, low: int, high: int = MAX_COUNT, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = _check_integer(name, value)
        if not low <= number <= high:
            allowed = f"at least {low} and at most {high}" if high == MAX_COUNT else f"from {low} to {high}"
            raise ArgumentError(f"{name} must be {allowed}, got {value!r}")
        object.__setattr__(self, name, number)


_UNSET: dict[str, Any] = {one.name: one.default for one in fields(SamplingParams)}
_HEEDED = _UNSET.keys() - _OF_DRAWS - _OF_PROMPTS - _OF_TEXT - _OF_ENDS
_get_heeded = attrgetter(*_HEEDED)
_HEEDED_UNSET = tuple(_UNSET[name] for name in _HEEDED)
_EARLY_ENDS = _OF_ENDS - {"max_tokens", "ignore_eos"}


def _check_integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ArgumentError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, got {value!r}") from None


def _check_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else _check_list(name, value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ArgumentError(f"{name} must hold non-empty strings, got {string!r}")
        if len(string) > MAX_STOP_LENGTH:
            raise ArgumentError(f"{name} may hold strings of {MAX_STOP_LENGTH} characters at most, got {len(string)}")
    return strings


def _check_token_ids(name: str, value: Any, longest: int = MAX_STOPS) -> tuple[int, ...]:
    given = () if value is None else _check_list(name, value, longest)
    return tuple(dict.fromkeys(_check_token_id(name, i) for i in given))


def _check_token_id(name: str, value: Any) -> int:
    token_id = _check_integer(f"every one of {name}", value)
    if not 0 <= token_id <= MAX_COUNT:
        raise ArgumentError(f"{name} must hold token ids, at least 0 and at most {MAX_COUNT}, got {token_id}")
    return token_id


def _check_biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ArgumentError(f"logit_bias must map token ids to numbers, got {value!r}")
    if len(value) > MAX_BIASES:
        raise ArgumentError(f"logit_bias may hold at most {MAX_BIASES} entries, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10  # as JSON has it
        token_id = _check_token_id("logit_bias", int(key) if is_text else key)
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ArgumentError(
                f"logit_bias must hold numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, {token_id} has {bias!r}"
            )
        biases[token_id] = float(bias)
    return biases or None


def _read_form(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise ArgumentError(f"structured_outputs must be StructuredOutputsParams or a mapping, got {value!r}")
    known = [one.name for one in fields(StructuredOutputsParams)]
    for name in value:
        if name not in known:
            raise ArgumentError(
                f"structured_outputs has no {name!r}: there is {', '.join(known)}{suggest_name(name, known)}"
            )
    return StructuredOutputsParams(**value)


def _check_bad_words(value: Any) -> tuple[BadWord, ...]:
    words = [_check_bad_word(word) for word in (() if value is None else _check_list("bad_words", value))]
    count = sum(2 if isinstance(word, str) else 1 for word in words)
    if count > MAX_BAD_WORDS:
        raise ArgumentError(f"bad_words may hold {MAX_BAD_WORDS} entries, where a text counts for two; got {count}")
    return tuple(dict.fromkeys(words))


def _check_bad_word(word: Any) -> BadWord:
    if isinstance(word, str):
        if not word.strip() or len(word) > MAX_STOP_LENGTH:
            raise ArgumentError(f"bad_words must hold texts of 1 to {MAX_STOP_LENGTH} characters, not only spaces")
        return word
    tokens = _check_list("every one of bad_words", word, MAX_BAD_WORD_TOKENS)
    if not tokens:
        raise ArgumentError("bad_words must hold texts, or lists of one token id at least")
    return tuple(_check_token_id("bad_words", token) for token in tokens)


def _check_callbacks(name: str, value: Any, num_arguments: int) -> tuple[Any, ...]:
    """Checks that every entry takes `num_arguments` arguments, as far as signatures show."""
    callbacks = _check_list(name, () if value is None else value, MAX_CALLBACKS)
    for callback in callbacks:
        if not callable(callback) or isinstance(callback, type):
            raise ArgumentError(f"{name} must hold functions or callable objects, got {callback!r}")
        try:
            signature = inspect.signature(callback)
        except (TypeError, ValueError):  # some functions written in C have no signature
            continue
        try:
            signature.bind(*range(num_arguments))
        except TypeError:
            raise ArgumentError(
                f"{name} are called with {num_arguments} arguments, but {callback!r} takes {signature}"
            ) from None
    return callbacks


def _check_list(name: str, value: Any, longest: int = MAX_STOPS) -> tuple[Any, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise ArgumentError(f"{name} must be a list, got {value!r}")
    items = tuple(value)
    if len(items) > longest:
        raise ArgumentError(f"{name} may hold at most {longest} entries, got {len(items)}")
    return items
