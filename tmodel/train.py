"""Training a small language model from nothing: tokenizer, model, and the bigram model that it has to beat.

Everything follows from the recipe, the corpus and the seed. Transformers is imported inside the functions: its model
classes import Triton, and tkernels must be the first to do so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tmodel.corpus import Corpus
from tmodel.transformers_models import new_transformers_model

END_OF_TEXT = "<|endoftext|>"
_BIGRAM_DISCOUNT = 0.75  # the customary constant of absolute discounting; 0.5 to 0.9 change the loss by less than 0.01


class TrainingError(RuntimeError):
    """The trained model is not good enough to be handed out."""


@dataclass(frozen=True)
class Recipe:
    """All that decides how a preset is made. `version` goes up when the training code changes what comes out.

    `config` is the config.json that it will have, as far as the sizes are given.
    """

    version: int
    config: Mapping[str, Any]
    corpus_bytes: int
    sequence_len: int
    batch_size: int
    num_steps: int
    matrix_learning_rate: float
    vector_learning_rate: float

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""
        return int(self.config["vocab_size"])


@dataclass(frozen=True)
class TrainingReport:
    """Mean negative log-likelihoods are in nats per token, over the same held-out tokens."""

    held_out_loss: float
    bigram_loss: float
    held_out_tokens: int
    training_tokens: int
    seconds: float


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (transformers' PreTrainedTokenizerFast): no text is out of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one int64 row of tokens, each text closed by END_OF_TEXT."""
    encodings = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in (*encoding.ids, tokenizer.eos_token_id)])


def bigram_loss(training: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> float:
    """Nats per held-out token of an interpolated bigram model with absolute discounting.

    p(b|a) = max(c(a,b) - d, 0) / c(a) + d |{b': c(a,b') > 0}| / c(a) * p(b), p(b) with one added to each count;
    Ney, Essen and Kneser, 1994.
    """
    pairs = torch.bincount(training[:-1] * vocab_size + training[1:], minlength=vocab_size**2)
    counts = pairs.view(vocab_size, vocab_size).double()  # [previous, next]
    unigram = (counts.sum(0) + 1) / (counts.sum() + vocab_size)  # [next]
    seen = counts.sum(1, keepdim=True)
    left_over = torch.where(seen > 0, _BIGRAM_DISCOUNT * (counts > 0).sum(1, keepdim=True) / seen, 1.0)
    probabilities = (counts - _BIGRAM_DISCOUNT).clamp(min=0) / seen.clamp(min=1) + left_over * unigram
    return -probabilities[held_out[:-1], held_out[1:]].log().mean().item()


def new_model(recipe: Recipe, end_token_id: int) -> Any:
    """transformers' model of the recipe's shape; its weights come from torch's current random state."""
    return new_transformers_model(recipe.config, bos_token_id=None, eos_token_id=end_token_id)


def train(model: Any, tokens: torch.Tensor, recipe: Recipe, seed: int) -> None:
    """Next-token training on random windows of `tokens`: Muon for the matrices, AdamW for embedding and norms.

    Muon (Jordan et al., 2024) earns its keep: tried with 2,048 tokens a step, it stood at 3.84 held-out nats after 344
    steps, AdamW alone at 4.09 after 432, and steps are what a minute is short of.
    """
    order = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(vectors, lr=recipe.vector_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_share(step, recipe.num_steps))
        for optimizer in optimizers
    ]
    columns = (TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=recipe.num_steps, loss=math.log(recipe.vocab_size))
        for _ in range(recipe.num_steps):
            starts = torch.randint(len(tokens) - recipe.sequence_len, (recipe.batch_size,), generator=order)
            windows = tokens[starts[:, None] + torch.arange(recipe.sequence_len + 1)]  # [batch, sequence_len + 1]
            loss = _loss(model, windows)
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            progress.update(task, advance=1, loss=loss.item())


def held_out_loss(model: Any, tokens: torch.Tensor, sequence_len: int) -> float:
    """Nats per token over all whole windows of `tokens`, each read without what comes before it."""
    num_windows = (len(tokens) - 1) // sequence_len
    windows = tokens.unfold(0, sequence_len + 1, sequence_len)[:num_windows]  # [windows, sequence_len + 1]
    with torch.inference_mode():
        total = sum(_loss(model, chunk).item() * len(chunk) for chunk in windows.split(32))
    return float(total) / num_windows


def train_on(corpus: Corpus, recipe: Recipe, seed: int) -> tuple[Any, Any, TrainingReport]:
    """(model, tokenizer, report). Raises TrainingError where the model does not beat the bigram model on held-out
    text.
    """
    started = time.perf_counter()
    tokenizer = train_tokenizer(corpus.training, recipe.vocab_size)
    training, held_out = encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(recipe, tokenizer.eos_token_id)
        train(model, training, recipe, seed)
    held_out = held_out[: (len(held_out) - 1) // recipe.sequence_len * recipe.sequence_len + 1]
    report = TrainingReport(
        held_out_loss=held_out_loss(model, held_out, recipe.sequence_len),
        bigram_loss=bigram_loss(training, held_out, recipe.vocab_size),
        held_out_tokens=len(held_out) - 1,
        training_tokens=recipe.num_steps * recipe.batch_size * recipe.sequence_len,
        seconds=time.perf_counter() - started,
    )
    if not report.held_out_loss < report.bigram_loss:
        raise TrainingError(
            f"the trained model's held-out loss, {report.held_out_loss:.3f} nats a token, does not beat "
            f"the bigram model's, {report.bigram_loss:.3f}"
        )
    return model, tokenizer, report


def _loss(model: Any, windows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # [batch, sequence_len, vocab]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _learning_rate_share(step: int, num_steps: int) -> float:
    """A short warm-up, a plateau, and a straight line to zero over the last 40%."""
    return min(1.0, (step + 1) / 30, (num_steps - step) / (0.4 * num_steps))
