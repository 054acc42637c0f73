"""From token ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what a decoder puts where bytes are not, or not yet, a character
_MAX_WINDOW = 64  # tokens decoded at once; only output that is no UTF-8 at all makes the window grow this far


class IncrementalDetokenizer:
    """Appends tokens, gives text that is final, and finds stop strings, also where one spans tokens.

    A token's text depends on its neighbours (a leading space, half a character), so a window of tokens is decoded
    together: those that were last seen to end a character, for context, and those since. The pieces add up to what all
    tokens decode to at once, wherever that is valid text.

    What is held back at the end is every replacement character, not an unfinished character's one to three: a decoder
    with byte fallback shows a whole run of bytes as such as long as one byte of it is missing.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._stop_starts = {stop[0] for stop in self._stops}
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._context: list[int] = []  # tokens whose text is out
        self._context_text = ""  # theirs alone
        self._pending: list[int] = []  # tokens of which some text may not be
        self._num_out = 0  # characters of theirs that are

    @property
    def stable_len(self) -> int:
        """The characters of `text` that no later token can take away: those before what may begin a stop string."""
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
        """The text that has become final with `token_id`; "" while a character is unfinished.

        `is_stopped` tells whether a stop string is now in the text, which is cut off before it. With `may_stop` false
        none is looked for.
        """
        if self.is_stopped:
            raise RuntimeError("the text has ended at a stop string")
        self._pending.append(token_id)
        body = self._body()
        partial = len(body) - len(body.rstrip(_REPLACEMENT))
        is_full = len(self._pending) > _MAX_WINDOW
        final_len = len(body) if is_full else len(body) - partial
        new = body[self._num_out : final_len]
        self._num_out = max(self._num_out, final_len)
        if partial == 0 or is_full:
            if new:  # else they are special tokens, which give no context
                self._context = self._pending
                self._context_text = self._decode(self._context)
            if new or is_full:
                self._pending = []
                self._num_out = 0
        return self._extend(new, may_stop)

    def finish(self) -> str:
        """The text still held back; call it once, when no more tokens come."""
        if self.is_stopped or not self._pending:
            return ""
        new = self._body()[self._num_out :]
        self._pending = []
        return self._extend(new, may_stop=True)

    def _body(self) -> str:
        """The text of the pending tokens, as it reads after the context."""
        window = self._decode([*self._context, *self._pending])
        if window.startswith(self._context_text):
            return window[len(self._context_text) :]
        # Byte fallback: bytes that are no text have made replacements of the characters before them, too.
        return self._decode(self._pending)

    def _extend(self, new: str, may_stop: bool) -> str:
        before = len(self.text)
        self.text += new
        if may_stop and new and self._stops:
            # A stop string that ends in the new text begins at most its length less one character before it.
            start = max(0, before - self._longest_stop + 1)
            found = [at for at in (self.text.find(stop, start) for stop in self._stops) if at >= 0]
            if found:
                self.text = self.text[: min(found)]
                self.is_stopped = True
        return self.text[before:]
