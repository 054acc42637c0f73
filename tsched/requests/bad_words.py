"""Words that an output must not hold, as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsched.requests.errors import RefusedError

MAX_BAD_WORDS = 512  # token sequences of a request; a text counts for two
MAX_BAD_WORD_TOKENS = 64

BadWord = str | Sequence[int]


def spell_bad_words(words: Sequence[BadWord], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Spells words in tokens. Words that are token ids already stay as they are.

    A text is spelled as it begins an output, and as it follows a space where that is as many tokens and another first
    one, which is vLLM's rule.

    Args:
        words: The words.
        encode: Text -> token ids, without special tokens.

    Raises:
        RefusedError: A word has no token, or too many.
    """
    spelled: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            spelled.append(tuple(word))
            continue
        bare = word.lstrip()
        plain, spaced = (tuple(encode(text)) for text in (bare, f" {bare}"))
        if not 1 <= len(plain) <= MAX_BAD_WORD_TOKENS:
            raise RefusedError(
                f"bad_words may hold words of 1 to {MAX_BAD_WORD_TOKENS} tokens, {word!r} has {len(plain)}"
            )
        spelled.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spelled.append(spaced)
    return spelled
