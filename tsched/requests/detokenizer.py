"""From token ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # decoders put it where bytes are not, or not yet, a character
_MAX_WINDOW = 64  # tokens decoded at once; the window grows this far only where the output is no UTF-8 at all


class IncrementalDetokenizer:
    """Appends tokens, returns text that is final, and finds stop strings, also across tokens.

    A token's text depends on its neighbours (a leading space, half a character). So a window is decoded together: the
    tokens that last completed a character, for context, and those since. The pieces add up to the text of all tokens
    decoded at once, wherever that text is valid.

    All replacement characters at the end are held back, not only the one to three of an unfinished character: a decoder
    with byte fallback replaces a whole run of bytes while one byte of it is missing.

    Args:
        decode: Token ids -> text.
        stop_strings: Strings that end the text.

    Attributes:
        text: All final text so far.
        is_stopped: Whether a stop string ended it.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._stop_starts = {stop[0] for stop in self._stops}
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._context: list[int] = []  # the last tokens whose text is all in `text`
        self._context_text = ""  # decoded from the context alone
        self._pending: list[int] = []  # tokens since, whose text may be held back
        self._num_out = 0  # characters of the pending tokens that are in `text`

    @property
    def stable_len(self) -> int:
        """Characters of `text` that no later token can cut off: a stop string may have begun after them."""
        if self.is_stopped or not self._stops:
            return len(self.text)
        for start in range(max(0, len(self.text) - self._longest_stop + 1), len(self.text)):
            if self.text[start] not in self._stop_starts:
                continue
            tail = self.text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(self.text)

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """Appends a token; sets `is_stopped` and cuts the text where it completes a stop string.

        Args:
            token_id: The next token.
            may_stop: Whether to look for stop strings.

        Returns:
            The text that became final; "" while a character is unfinished.

        Raises:
            RuntimeError: A stop string has ended the text.
        """
        if self.is_stopped:
            raise RuntimeError("the text has ended at a stop string")
        self._pending.append(token_id)
        body = self._decode_pending()
        partial = len(body) - len(body.rstrip(_REPLACEMENT))
        is_full = len(self._pending) > _MAX_WINDOW
        final_len = len(body) if is_full else len(body) - partial
        new = body[self._num_out : final_len]
        self._num_out = max(self._num_out, final_len)
        if partial == 0 or is_full:
            if new:  # special tokens have no text and give no context
                self._context = self._pending
                self._context_text = self._decode(self._context)
            if new or is_full:
                self._pending = []
                self._num_out = 0
        return self._append_text(new, may_stop)

    def finish(self) -> str:
        """Returns the text still held back. Call it once, after the last token."""
        if self.is_stopped or not self._pending:
            return ""
        new = self._decode_pending()[self._num_out :]
        self._pending = []
        return self._append_text(new, may_stop=True)

    def _decode_pending(self) -> str:
        """Decodes the pending tokens as they read after the context."""
        window = self._decode([*self._context, *self._pending])
        if window.startswith(self._context_text):
            return window[len(self._context_text) :]
        # Byte fallback: bytes that are no text turn the characters before them into replacements too.
        return self._decode(self._pending)

    def _append_text(self, new: str, may_stop: bool) -> str:
        before = len(self.text)
        self.text += new
        if may_stop and new and self._stops:
            # A stop string that ends in the new text begins at most its length less one character before it.
            start = max(0, before - self._longest_stop + 1)
            places = [place for place in (self.text.find(stop, start) for stop in self._stops) if place >= 0]
            if places:
                self.text = self.text[: min(places)]
                self.is_stopped = True
        return self.text[before:]
