"""From token ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "�"  # what a decoder puts where bytes are not, or not yet, a character
_MAX_PARTIAL = 3  # a UTF-8 character has four bytes at most; decoders show an unfinished one as up to three of these
_MAX_WINDOW = 64  # tokens decoded at once; only output that is no UTF-8 at all makes the window grow this far


class IncrementalDetokenizer:
    """Appends tokens, gives text that is final, and finds stop strings, also where one spans tokens.

    A token's text depends on its neighbours (a leading space, half a character), so a window of tokens is decoded
    together: those that were last seen to end a character, for context, and those since.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._context: list[int] = []  # tokens whose text is out
        self._pending: list[int] = []  # tokens of which some text may not be
        self._shown_len = 0  # characters of the window that are out

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that has become final with `token_id`; "" while a character is unfinished.

        `is_stopped` tells whether a stop string is now in the text, which is cut off before it. With `may_stop` false
        none is looked for.
        """
        if self.is_stopped:
            raise RuntimeError("the text has ended at a stop string")
        self._pending.append(token_id)
        window = self._decode([*self._context, *self._pending])
        partial = len(window) - len(window.rstrip(_REPLACEMENT))
        final_len = len(window) - min(partial, _MAX_PARTIAL)
        new = window[self._shown_len : final_len]
        self._shown_len = max(self._shown_len, final_len)
        if partial == 0 or len(self._pending) > _MAX_WINDOW:
            new += window[self._shown_len :]
            if new:  # else they are special tokens, which give no context
                self._context = self._pending
                self._shown_len = len(self._decode(self._context))
            if new or len(self._pending) > _MAX_WINDOW:
                self._pending = []
        return self._extend(new, may_stop)

    def finish(self) -> str:
        """The text still held back; call it once, when no more tokens come."""
        if self.is_stopped or not self._pending:
            return ""
        window = self._decode([*self._context, *self._pending])
        self._pending = []
        return self._extend(window[self._shown_len :], may_stop=True)

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
