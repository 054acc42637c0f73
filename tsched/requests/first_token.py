"""Do a request's parameters leave a token that its output may begin with?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsched.requests.errors import RefusedError
from tsched.requests.grammar import Grammar
from tsched.requests.sampling_params import SamplingParams

_BARRING = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logits_processors")
"""The parameters that may bar a token."""


def name_barring_parameters(params: SamplingParams) -> list[str]:
    """Those of the parameters that bar tokens which are given."""
    names = [name for name in _BARRING if getattr(params, name)]
    return [*names, "stop_token_ids"] if params.min_tokens and params.stop_ids else names


def check_first_token(
    params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int], grammar: Grammar | None = None
) -> None:
    """Checks that the parameters leave a token to begin with. Logits processors are not asked.

    Args:
        params: Their bad_words that are texts bar nothing here.
        vocab_size: The model's.
        eos_token_ids: The model's.
        grammar: Of structured_outputs; None where it is not known yet, or there is none.

    Raises:
        RefusedError: They leave none. The message begins with a field's name.
    """
    if params.max_tokens == 0 or not name_barring_parameters(params):
        return
    is_left = np.ones(vocab_size, dtype=np.bool_)
    if grammar is not None:
        mask = np.frombuffer(grammar.first_mask, dtype=np.uint8)
        is_left &= np.unpackbits(mask, count=vocab_size, bitorder="little").astype(np.bool_)
    if params.allowed_ids is not None:
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        allowed[list(params.allowed_ids)] = True
        is_left &= allowed
    is_left[[word[0] for word in params.forbidden if not isinstance(word, str) and len(word) == 1]] = False
    if params.min_tokens:
        ends = {*params.stop_ids, *(() if params.ignore_eos else eos_token_ids)}
        is_left[[end for end in ends if end < vocab_size]] = False
    if not is_left.any():
        first, *others = [name for name in name_barring_parameters(params) if name != "logits_processors"]
        beside = f" beside {' and '.join(others)}" if others else ""
        raise RefusedError(f"{first}{beside} leaves the output no token to begin with")
