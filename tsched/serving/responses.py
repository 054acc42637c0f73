"""From deltas to bodies and streams. A stream's choices, joined, are the whole's, because both are made here."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

from tsched.serving.engine_client import Delta, SampleDelta, TokenScores
from tsched.serving.protocol.errors import ApiError
from tsched.serving.requests import Job, Prompt
from tsched.serving.text import TextCodec

DONE = b"data: [DONE]\n\n"
# In ASCII: to clients that split text into lines, as httpx does, U+0085 and U+2028 end an event.
_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def frame(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + _encode_json(content).encode() + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """The last event of a stream that failed; no [DONE] comes after it."""
    return frame(error.detail)


class _CompletionLogprobs:
    """The log-probabilities of a completion's tokens, and where in the text they stand."""

    def __init__(self, codec: TextCodec | None, num_top: int, *, skip_special_tokens: bool) -> None:
        self._codec, self._num_top, self._offset, self._skips = codec, num_top, 0, skip_special_tokens
        # Half a character has no place of its own: it stands where the character begins.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def describe(self, places: Sequence[TokenScores | None], token_ids: Sequence[int]) -> dict[str, Any]:
        tokens, offsets, logprobs, tops = [], [], [], []
        for token_id, place in zip(token_ids, places, strict=True):
            tokens.append(_name(self._codec, token_id))
            offsets.append(self._offset)
            piece = b"" if self._codec is None else self._codec.text_bytes(token_id, skip_special_tokens=self._skips)
            self._offset += len(self._decoder.decode(piece))
            logprobs.append(None if place is None else place.logprobs[0])
            tops.append(None if place is None else self._top(place))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, place: TokenScores) -> dict[str, float]:
        pairs = [(place.token_ids[0], place.logprobs[0]), *_most_likely(place, self._num_top)]
        return {_name(self._codec, token_id): logprob for token_id, logprob in pairs}


class CompletionWriter:
    """One choice of /v1/completions."""

    def __init__(self, job: Job, index: int, prompt: Prompt, codec: TextCodec | None) -> None:
        self._index, self._is_echoed, self._echo, self._prompt_ids = index, job.echo, prompt.echo, prompt.token_ids
        self._prompt_scores: Sequence[TokenScores | None] = ()
        self._logprobs = None
        if job.top_logprobs is not None:
            skips = job.skip_special_tokens
            self._logprobs = _CompletionLogprobs(codec, job.top_logprobs, skip_special_tokens=skips)

    def add_prompt(self, scores: Sequence[TokenScores | None]) -> None:
        """Takes the prompt's log-probabilities [n]; the next chunk has them."""
        if self._is_echoed and self._logprobs is not None:
            self._prompt_scores = scores

    def write(self, delta: SampleDelta) -> dict[str, Any]:
        """The choice of a chunk."""
        text, self._echo = self._echo + delta.text, ""
        logprobs = None
        if self._logprobs is not None:
            ids = self._prompt_ids[: len(self._prompt_scores)]  # none, but where the prompt is echoed
            places, self._prompt_scores = [*self._prompt_scores, *(delta.logprobs or ())], ()
            logprobs = self._logprobs.describe(places, [*ids, *delta.token_ids])
        return {"index": self._index, "text": text, "logprobs": logprobs, **_describe_end(delta)}

    @staticmethod
    def is_empty(choice: dict[str, Any]) -> bool:
        """Whether a chunk says nothing, as where a character is held back."""
        return not choice["text"] and choice["finish_reason"] is None and not (choice["logprobs"] or {}).get("tokens")

    @staticmethod
    def join(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole choice of all its chunks."""
        logprobs = None
        if choices[-1]["logprobs"] is not None:
            names = choices[-1]["logprobs"]
            logprobs = {name: [one for part in choices for one in part["logprobs"][name]] for name in names}
        return {**choices[-1], "text": "".join(part["text"] for part in choices), "logprobs": logprobs}


class ChatWriter:
    """One choice of /v1/chat/completions."""

    def __init__(self, job: Job, index: int, prompt: Prompt, codec: TextCodec | None) -> None:
        self._index, self._codec, self._num_top, self._is_begun = index, codec, job.top_logprobs, False

    def add_prompt(self, scores: Sequence[TokenScores | None]) -> None:
        """A chat's answer does not repeat the prompt."""

    def write(self, delta: SampleDelta) -> dict[str, Any]:
        """The choice of a chunk; the first has the role."""
        content = {"content": delta.text} if self._is_begun else {"role": "assistant", "content": delta.text}
        self._is_begun = True
        logprobs = None
        if self._num_top is not None:
            logprobs = {"content": [self._describe(place) for place in delta.logprobs or []]}
        return {"index": self._index, "delta": content, "logprobs": logprobs, **_describe_end(delta)}

    @staticmethod
    def is_empty(choice: dict[str, Any]) -> bool:
        """Whether a chunk says nothing, as where a character is held back; the first says whose message it is."""
        says = choice["delta"]["content"] or "role" in choice["delta"] or choice["finish_reason"] is not None
        return not says and not (choice["logprobs"] or {}).get("content")

    @staticmethod
    def join(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole choice of all its chunks."""
        logprobs = None
        if choices[-1]["logprobs"] is not None:
            logprobs = {"content": [one for part in choices for one in part["logprobs"]["content"]]}
        text = "".join(part["delta"]["content"] for part in choices)
        return {
            "index": choices[-1]["index"],
            "message": {"role": "assistant", "content": text},
            "logprobs": logprobs,
            "finish_reason": choices[-1]["finish_reason"],
            "stop_reason": choices[-1]["stop_reason"],
        }

    def _describe(self, place: TokenScores) -> dict[str, Any]:
        top = _most_likely(place, self._num_top or 0)
        return {
            **self._entry(place.token_ids[0], place.logprobs[0]),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = b"" if self._codec is None else self._codec.token_bytes(token_id)
        return {"token": _name(self._codec, token_id), "logprob": logprob, "bytes": list(piece)}


def _describe_end(delta: SampleDelta) -> dict[str, Any]:
    """Why a choice ended; `stop_reason` is vLLM's: the stop string or token that ended it."""
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _most_likely(place: TokenScores, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of a place, the likeliest first."""
    pairs = list(zip(place.token_ids, place.logprobs, strict=True))
    return sorted(dict(pairs).items(), key=lambda pair: -pair[1])[:count]


def _name(codec: TextCodec | None, token_id: int) -> str:
    return f"token_id:{token_id}" if codec is None else codec.token(token_id)


class Answer:
    """The answer to one job: its usage so far, and its choices."""

    def __init__(self, job: Job, codec: TextCodec | None) -> None:
        self.job = job
        self._num_cached = [0] * len(job.prompts)
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self._codec = codec
        self._num_made = [0] * len(job.prompts)
        self._writers = [writer for place in range(len(job.prompts)) for writer in self._make_writers(place)]
        kind = "text_completion" if job.api == "completion" else "chat.completion"
        self._head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._chunk_head = {**self._head, "object": "text_completion" if kind == "text_completion" else f"{kind}.chunk"}

    @property
    def num_completion_tokens(self) -> int:
        """Made so far."""
        return sum(self._num_made)

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    def _make_writers(self, place: int) -> list[CompletionWriter | ChatWriter]:
        job, prompt = self.job, self.job.prompts[place]
        kind = ChatWriter if job.api == "chat" else CompletionWriter
        return [kind(job, index, prompt, self._codec) for index in range(place * job.n, (place + 1) * job.n)]

    def start_over(self, place: int) -> None:
        """Forgets what was written of prompt `place`."""
        self._num_made[place] = 0
        self._writers[place * self.job.n : (place + 1) * self.job.n] = self._make_writers(place)

    def write_choices(self, place: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of chunks for what is new of prompt `place`."""
        if delta.num_cached_tokens is not None:
            self._num_cached[place] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            for writer in self._writers[place * self.job.n : (place + 1) * self.job.n]:
                writer.add_prompt(delta.prompt_logprobs)
        choices = []
        for sample in delta.samples:
            self._num_made[place] += len(sample.token_ids)
            choices.append(self._writers[place * self.job.n + sample.sample].write(sample))
        return choices

    def write_chunks(self, place: int, delta: Delta) -> bytes:
        """The same as events, one a choice; b"" where there is nothing to say."""
        events = []
        for choice in self.write_choices(place, delta):
            if not self._writers[0].is_empty(choice):
                chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
                if self.job.continuous_usage:
                    chunk["usage"] = self.usage
                elif self.job.include_usage:
                    chunk["usage"] = None
                events.append(frame(chunk))
        return b"".join(events)

    def end_stream(self) -> bytes:
        """The last events of a stream that went well."""
        if not self.job.include_usage:
            return DONE
        return frame({**self._chunk_head, "choices": [], "usage": self.usage}) + DONE

    def make_body(self, choices: Sequence[dict[str, Any]]) -> bytes:
        """The whole answer of all chunks' choices, in the order of their indices."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self._writers]
        for choice in choices:
            parts[choice["index"]].append(choice)
        joined = [writer.join(part) for writer, part in zip(self._writers, parts, strict=True)]
        return _encode_json({**self._head, "choices": joined, "usage": self.usage}).encode()
