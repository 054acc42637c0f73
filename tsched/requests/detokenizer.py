"""From token ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tsched.requests.callbacks import is_users_interrupt
from tsched.requests.errors import UsageError

Decode = Callable[[Sequence[int]], str]
Step = Callable[[int], str | None]
"""The next token id -> the text that it completes, if any; as `step` of a tokenizers DecodeStream."""
OpenStream = Callable[[list[int]], Step]
"""Token ids, whose text is out already -> a stream that goes on after them."""

_REPLACEMENT = "\ufffd"  # decoders put it where bytes are not, or not yet, a character
_MAX_WINDOW = 64  # tokens decoded at once; the window grows this far only where the output is no UTF-8 at all
_MAX_HELD = 8  # tokens that a stream may hold back: it decodes them all again at each step


class IncrementalDetokenizer:
    """Appends tokens, returns text that is final, and finds stop strings, also across tokens.

    A token's text depends on its neighbours (a leading space, half a character). So a window is decoded together: the
    tokens that last completed a character, for context, and those since. The pieces add up to the text of all tokens
    decoded at once, wherever that text is valid.

    A stream of the tokenizers library does the same in a seventh of the time. Where there is one, windows are decoded
    here only while it cannot go on: after bytes that are no text. A token whose text is known not to depend on those
    before needs neither, as long as nothing is held back: that takes a fifth of the time again.

    All replacement characters at the end are held back, not only the one to three of an unfinished character: a decoder
    with byte fallback replaces a whole run of bytes while one byte of it is missing.

    Args:
        decode: Token ids -> text.
        stop_strings: Strings that end the text.
        open_stream: Opens a stream with the texts of `decode`; None where the tokenizer has none.
        textless: Tokens without text, which a stream would hold back.
        plain: Token id -> its text after any text, where that does not depend on it; "" of other tokens. None where
            nothing is known of the tokenizer.
        includes_stop: Whether the text ends after the stop string, not before.

    Attributes:
        found_stop: The stop string that ended the text; None where none has.
    """

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        *,
        open_stream: OpenStream | None = None,
        textless: frozenset[int] = frozenset(),
        plain: Mapping[int, str] | None = None,
        includes_stop: bool = False,
    ) -> None:
        self.found_stop: str | None = None
        self._includes_stop = includes_stop
        self._pieces: list[str] = []  # all final text so far
        self._decode = decode
        self._open_stream = open_stream
        self._step = None if open_stream is None else open_stream([])
        self._textless = textless
        self._plain = plain
        self._even: Mapping[int, str] | None = None  # `plain` while there is text and nothing is held back
        self._skipped: int | None = None  # the last token, where it was plain: the stream and the window lack it
        self._stops = tuple(stop_strings)
        self._stop_starts = {stop[0] for stop in self._stops}
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._context: list[int] = []  # the last tokens whose text is all in `text`
        self._context_text: str | None = ""  # decoded from the context alone; None where a window did not need it yet
        self._pending: list[int] = []  # tokens since, whose text may be held back
        self._num_out = 0  # characters of the pending tokens that are in `text`

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.found_stop is not None

    @property
    def text(self) -> str:
        """All final text so far."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def stable_len(self) -> int:
        """Characters of `text` that no later token can cut off: a stop string may have begun after them."""
        text = self.text
        if self.is_stopped or not self._stops or self._includes_stop:
            return len(text)
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if text[start] not in self._stop_starts:
                continue
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """Appends a token; sets `is_stopped` and cuts the text where it completes a stop string.

        Args:
            token_id: The next token.
            may_stop: Whether to look for stop strings.

        Returns:
            The text that became final; "" while a character is unfinished.

        Raises:
            UsageError: A stop string has ended the text.
        """
        if self.found_stop is not None:
            raise UsageError("the text has ended at a stop string")
        if self._even is not None and (new := self._even[token_id]):
            self._skipped = token_id
            if self._stops:
                return self._append_text(new, may_stop)
            self._pieces.append(new)
            return new
        if token_id in self._textless:
            return ""
        return self._append_in_context(token_id, may_stop)

    def _append_in_context(self, token_id: int, may_stop: bool) -> str:
        """Appends a token whose text may depend on those before."""
        if self._skipped is not None:
            self._context, self._context_text, self._skipped = [self._skipped], None, None
            if self._open_stream is not None:
                self._step = self._open_stream(self._context)
        new = None if self._step is None else self._append_to_stream(self._step, token_id)
        if new is None:
            new = self._append_to_window(token_id)
        self._even = self._plain if new and not self._pending else None
        return self._append_text(new, may_stop) if new else ""

    def finish(self) -> str:
        """Returns the text still held back. Call it once, after the last token."""
        if self.is_stopped or not self._pending:
            return ""
        new = self._decode_pending()[self._num_out :]
        self._pending = []
        return self._append_text(new, may_stop=True)

    def _append_to_stream(self, step: Step, token_id: int) -> str | None:
        """Returns the text that a token completes in the stream; None, and no stream is left, where it cannot go on."""
        try:
            new = step(token_id)
        except BaseException as error:  # bytes that are no text, or a fault, of which decoding a window says more
            if is_users_interrupt(error):
                raise
            self._step = None
            return None
        if new:
            self._context, self._context_text = [*self._pending, token_id], None
            self._pending = []
            return new
        if len(self._pending) == _MAX_HELD:
            self._step = None
            return None
        self._pending.append(token_id)
        return ""

    def _append_to_window(self, token_id: int) -> str:
        """Appends a token to the window and returns the text that became final."""
        self._pending.append(token_id)
        body = self._decode_pending()
        partial = len(body) - len(body.rstrip(_REPLACEMENT))
        is_full = len(self._pending) > _MAX_WINDOW
        final_len = len(body) if is_full else len(body) - partial
        new = body[self._num_out : final_len]
        self._num_out = max(self._num_out, final_len)
        if partial == 0 or is_full:
            if new:  # special tokens have no text and give no context
                self._context, self._context_text = self._pending, None
            if new or is_full:
                self._pending = []
                self._num_out = 0
                if self._open_stream is not None and partial == 0:
                    self._step = self._open_stream(self._context)
        return new

    def _decode_pending(self) -> str:
        """Decodes the pending tokens as they read after the context."""
        if self._context_text is None:
            self._context_text = self._decode(self._context)
        window = self._decode([*self._context, *self._pending])
        if window.startswith(self._context_text):
            return window[len(self._context_text) :]
        # Byte fallback: bytes that are no text turn the characters before them into replacements too.
        return self._decode(self._pending)

    def _append_text(self, new: str, may_stop: bool) -> str:
        self._pieces.append(new)
        if not self._stops:
            return new
        text, before = self.text, len(self.text) - len(new)
        if may_stop and new:
            # A stop string that ends in the new text begins at most its length less one character before it.
            start = max(0, before - self._longest_stop + 1)
            places = [(place, stop) for stop in self._stops if (place := text.find(stop, start)) >= 0]
            if places:
                place, self.found_stop = min(places, key=lambda found: found[0])
                text = text[: place + len(self.found_stop) if self._includes_stop else place]
                self._pieces = [text]
        return text[before:]
