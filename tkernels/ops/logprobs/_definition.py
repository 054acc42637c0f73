"""logprobs' definition: every row sorted, in float64.

No variant imports this file, so that none can be right because it is the same.
"""

import torch


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The natural logarithms of a given token's and of the most likely tokens' probabilities, by each row's softmax.

    Which tokens come first is defined to the bit: the larger logit, and of equal ones (zeros of either sign are equal)
    the lower id. A row with a NaN, with +inf or without a logit above -inf is at fault: its log-probabilities are NaN,
    its token ranks first, and its first tokens are listed.

    Args:
        logits: [B, V] fp32, a free row stride; -inf bars a token. float64 is taken as it is.
        tokens: [B] int64 in [0, V).
        top: How many of the most likely tokens are listed, V at most.

    Returns:
        logprobs [B], of the logits' dtype: the tokens', -inf of one that is barred.
        ranks [B] int64: 1 and how many of the row's logits are larger than the token's.
        top_tokens [B, top] int64, the most likely first.
        top_logprobs [B, top], of the logits' dtype.
    """
    rows = [_describe(*row, top) for row in zip(logits, tokens.tolist(), strict=True)]
    if not rows:
        empty = logits.new_empty((0, top))
        return logits.new_empty(0), torch.empty_like(tokens), empty.long(), empty
    ranks, listed = torch.tensor([row[1] for row in rows]), torch.stack([row[2] for row in rows])
    return torch.stack([row[0] for row in rows]), ranks, listed, torch.stack([row[3] for row in rows])


def _describe(row: torch.Tensor, token: int, top: int) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    largest = row.max()
    if not torch.isfinite(largest):  # a NaN is what max returns of a row that has one
        return row.new_tensor(torch.nan), 1, torch.arange(top), row.new_full((top,), torch.nan)
    ordered, order = row.sort(descending=True, stable=True)
    logprobs = row - largest - torch.log1p((ordered[1:] - largest).exp().sum())
    return logprobs[token], 1 + int((row > row[token]).sum()), order[:top], logprobs[order[:top]]
