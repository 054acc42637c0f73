"""logprobs by torch: a baseline for the kernels, and what a CPU computes."""

import torch


def baseline(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not logits.shape[0]:
        empty = logits.new_empty((0, top))
        return logits.new_empty(0), torch.empty_like(tokens), empty.long(), empty
    largest, place = logits.max(dim=1, keepdim=True)  # [B, 1]
    # Less the largest one's own 1, beside which a small rest would be lost, as log_softmax loses it.
    rest = (logits - largest).exp_().scatter_(1, place, 0.0).sum(dim=1, keepdim=True)
    total = rest.log1p_()
    at_fault = ~largest.isfinite()
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=1, keepdim=True) + 1
    first = torch.arange(top, device=logits.device)
    listed = torch.where(at_fault, first, _list_largest(logits, top))  # [B, top]
    logprobs = (chosen - largest - total).masked_fill_(at_fault, torch.nan)
    top_logprobs = (logits.gather(1, listed) - largest - total).masked_fill_(at_fault, torch.nan)
    return logprobs.squeeze(1), ranks.masked_fill_(at_fault, 1).squeeze(1), listed, top_logprobs


def _list_largest(logits: torch.Tensor, top: int) -> torch.Tensor:
    """The tokens [B, top] of each row's largest logits, the lower ids first where they are equal."""
    values, tokens = logits.topk(top, dim=1)
    if not top:
        return tokens
    last = values[:, -1:]
    # On a GPU ties are always resolved: a test for them would wait for the device.
    if logits.device.type != "cpu" or bool(((logits >= last).sum(dim=1) > top).any()):
        above, as_large = logits > last, logits == last
        kept = above | (as_large & (as_large.cumsum(dim=1) <= top - above.sum(dim=1, keepdim=True)))
        places = torch.arange(logits.shape[1], device=logits.device).where(kept, logits.shape[1])
        tokens = places.topk(top, dim=1, largest=False).values.clamp_(max=logits.shape[1] - 1)
    tokens = tokens.sort(dim=1).values
    order = logits.gather(1, tokens).sort(dim=1, descending=True, stable=True).indices
    return tokens.gather(1, order)
