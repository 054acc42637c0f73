"""Training a small language model from nothing: tokenizer, model, and the bigram model that it has to beat.

Everything follows from the recipe, the corpus and the seed. Transformers is imported inside the functions: its model
classes import Triton, and tkernels must be the first to do so.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tkernels.cores import usable_cores
from tkernels.errors import TKernelsError
from tmodel.corpus import Corpus
from tmodel.expert_load import balance_loss, count_tokens, load_entropy
from tmodel.training_state import load_state, save_state
from tmodel.transformers_models import new_transformers_model

END_OF_TEXT = "<|endoftext|>"
_LEAST_LOAD_ENTROPY = 0.8
_BIGRAM_DISCOUNT = 0.75  # the customary constant of absolute discounting; 0.5 to 0.9 change the loss by less than 0.01

_SECONDS_BETWEEN_STATES = 3.0  # a state of the tiny preset takes some 10 ms to write
_SECONDS_BETWEEN_LINES = 10.0


class TrainingError(TKernelsError, RuntimeError):
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
    """Mean negative log-likelihoods are in nats per token, over the same held-out tokens.

    `load_entropies` says of each layer with experts how evenly these tokens are shared out among them, 1 where each
    gets as many; None where there are no experts.
    """

    held_out_loss: float
    bigram_loss: float
    load_entropies: tuple[float, ...] | None
    held_out_tokens: int
    training_tokens: int
    seconds: float


CHAT_TEMPLATE = """\
{#- A model of Python's sources answers no questions: a chat is a dialogue in comments, for it to continue. -#}
{% for message in messages %}
{{ '# ' + message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '# assistant:' }}
{%- endif %}"""


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
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def as_loaded(tokenizer: Any, config: Any) -> Any:
    """The tokenizer as transformers loads it from beside the config.json of `config`: one of a Qwen2 splits texts by
    Qwen2's rule, whatever tokenizer.json says.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return AutoTokenizer.from_pretrained(directory)


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


def split_parameters(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The matrices that something is multiplied by, and stacks of such; and the rest: vectors, and tables whose rows
    are looked up.
    """
    tables = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    return matrices, [p for p in model.parameters() if p.ndim == 1 or id(p) in tables]


class StackedMuon(torch.optim.Muon):
    """torch's Muon, to which a stack [n, rows, columns], as transformers holds experts, is n matrices."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], learning_rate: float) -> None:
        self._parts = {
            stack: [torch.nn.Parameter(matrix) for matrix in stack.detach().unbind()]  # they share the stack's memory
            for stack in matrices
            if stack.ndim == 3
        }
        flat = [part for matrix in matrices for part in self._parts.get(matrix, [matrix])]
        super().__init__(flat, lr=learning_rate, momentum=0.95, weight_decay=0.0)

    def step(self, closure: Any = None) -> Any:
        """One update by the gradients that the stacks, and the matrices beside them, have."""
        for stack, parts in self._parts.items():
            assert stack.grad is not None
            for part, gradient in zip(parts, stack.grad.unbind(), strict=True):
                part.grad = gradient
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, those of the stacks too."""
        super().zero_grad(set_to_none)
        for stack in self._parts:
            stack.grad = None


def train(model: Any, tokens: torch.Tensor, recipe: Recipe, seed: int, state: Path | None = None) -> None:
    """Next-token training on random windows of `tokens`: Muon for the matrices, AdamW for embeddings and norms.

    Muon (Jordan et al., 2024) earns its keep: tried with 2,048 tokens a step, it stood at 3.84 held-out nats after 344
    steps, AdamW alone at 4.09 after 432, and steps are what a minute is short of.

    Routers also learn to share tokens out evenly, by `router_aux_loss_coef` of the config times the mean `balance_loss`
    of the layers.

    Args:
        state: A file that is written every few seconds and that training goes on from, after Ctrl-C or a kill, to the
            same weights; it stays until the caller removes it.
    """
    order = torch.Generator().manual_seed(seed)
    matrices, vectors = split_parameters(model)
    optimizers: list[torch.optim.Optimizer] = [
        StackedMuon(matrices, recipe.matrix_learning_rate),
        torch.optim.AdamW(vectors, lr=recipe.vector_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = (recipe.matrix_learning_rate, recipe.vector_learning_rate)
    training = f"{recipe}, seed {seed}, tokens {hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}"
    kept = load_state(state, model, optimizers, order, training) if state is not None else 0
    saved_s = time.monotonic()
    with _shown_progress(kept, recipe) as show:
        try:
            for step in range(kept, recipe.num_steps):
                for optimizer, rate in zip(optimizers, rates, strict=True):
                    optimizer.param_groups[0]["lr"] = rate * _learning_rate_share(step, recipe.num_steps)
                starts = torch.randint(len(tokens) - recipe.sequence_len, (recipe.batch_size,), generator=order)
                windows = tokens[starts[:, None] + torch.arange(recipe.sequence_len + 1)]  # [batch, sequence_len + 1]
                loss, routed = _read(model, windows)
                (loss + _balance_term(model, routed)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                show(step + 1, loss.item())
                if state is not None and time.monotonic() - saved_s > _SECONDS_BETWEEN_STATES:
                    save_state(state, step + 1, model, optimizers, order, training)
                    kept, saved_s = step + 1, time.monotonic()
        except KeyboardInterrupt:
            say(f"interrupted: the same training goes on from step {kept:,} when it is asked for again")
            raise


def say(message: str) -> None:
    """One line to stderr, at once."""
    Console(stderr=True, highlight=False).print(message, soft_wrap=True, markup=False)


@contextmanager
def _shown_progress(first_step: int, recipe: Recipe) -> Iterator[Callable[[int, float], None]]:
    """A function that is told (step, loss) after each step: a bar on a terminal, elsewhere a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        shown_s = time.monotonic()

        def print_line(step: int, loss: float) -> None:
            nonlocal shown_s
            if step == recipe.num_steps or time.monotonic() - shown_s > _SECONDS_BETWEEN_LINES:
                say(f"training: step {step:,} of {recipe.num_steps:,}, loss {loss:.3f}")
                shown_s = time.monotonic()

        yield print_line
        return
    columns = (TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "training", total=recipe.num_steps, completed=first_step, loss=math.log(recipe.vocab_size)
        )
        yield lambda step, loss: progress.update(task, completed=step, loss=loss)


@contextmanager
def _given_cores() -> Iterator[None]:
    """torch with at most a thread for each core that this process was given."""
    before = torch.get_num_threads()
    torch.set_num_threads(_given_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _given_threads() -> int:
    """As many as torch would start, which is OMP_NUM_THREADS or its affinity's, within the process's own cores."""
    return min(torch.get_num_threads(), usable_cores())


def judge(model: Any, tokens: torch.Tensor, sequence_len: int) -> tuple[float, tuple[float, ...] | None]:
    """(nats per token, load entropy of each layer with experts) over all whole windows of `tokens`, each read without
    what comes before it.
    """
    num_windows = (len(tokens) - 1) // sequence_len
    windows = tokens.unfold(0, sequence_len + 1, sequence_len)[:num_windows]  # [windows, sequence_len + 1]
    total = 0.0
    loads: list[torch.Tensor] = []  # of each chunk, [layers with experts, experts]
    with torch.inference_mode():
        for chunk in windows.split(32):
            loss, routed = _read(model, chunk)
            total += loss.item() * len(chunk)
            if routed:
                loads.append(torch.stack([count_tokens(one, model.config.num_experts_per_tok) for one in routed]))
    entropies = tuple(load_entropy(layer) for layer in torch.stack(loads).sum(0)) if loads else None
    return total / num_windows, entropies


def train_on(corpus: Corpus, recipe: Recipe, seed: int, state: Path | None = None) -> tuple[Any, Any, TrainingReport]:
    """(model, tokenizer, report). `state` is as in `train`; it is removed once the training has ended, well or not.

    Raises TrainingError where, on held-out text, the model does not beat the bigram model or a layer's experts do not
    share the tokens at least as evenly as an entropy of 0.8 of the largest.
    """
    started = time.perf_counter()
    # Before transformers is imported and a tokenizer is trained, which take longer than anyone waits in silence.
    say(
        f"training on Python's own sources, once: a tokenizer, then {recipe.num_steps:,} steps on "
        f"{_given_threads()} threads; after Ctrl-C the same command goes on"
    )
    tokenizer = train_tokenizer(corpus.training, recipe.vocab_size)
    with torch.random.fork_rng(devices=[]), _given_cores():
        torch.manual_seed(seed)
        model = new_model(recipe, tokenizer.eos_token_id)
        tokenizer = as_loaded(tokenizer, model.config)
        training, held_out = encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out)
        train(model, training, recipe, seed, state)
    if state is not None:
        state.unlink(missing_ok=True)
    held_out = held_out[: (len(held_out) - 1) // recipe.sequence_len * recipe.sequence_len + 1]
    loss, load_entropies = judge(model, held_out, recipe.sequence_len)
    report = TrainingReport(
        held_out_loss=loss,
        bigram_loss=bigram_loss(training, held_out, recipe.vocab_size),
        load_entropies=load_entropies,
        held_out_tokens=len(held_out) - 1,
        training_tokens=recipe.num_steps * recipe.batch_size * recipe.sequence_len,
        seconds=time.perf_counter() - started,
    )
    if not report.held_out_loss < report.bigram_loss:
        raise TrainingError(
            f"the trained model's held-out loss, {report.held_out_loss:.3f} nats a token, does not beat "
            f"the bigram model's, {report.bigram_loss:.3f}"
        )
    if load_entropies is not None and min(load_entropies) < _LEAST_LOAD_ENTROPY:
        raise TrainingError(
            f"the trained model's experts do not share the tokens evenly enough: the entropy of their load, as a share "
            f"of the largest, is {', '.join(f'{one:.3f}' for one in load_entropies)} by layer, and "
            f"{_LEAST_LOAD_ENTROPY} is the least"
        )
    return model, tokenizer, report


def _read(model: Any, windows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(next-token loss, the router's logits [tokens, experts] of each layer with experts)."""
    options = {"output_router_logits": True} if hasattr(model.config, "num_experts_per_tok") else {}
    output = model(input_ids=windows[:, :-1], use_cache=False, **options)  # its logits: [batch, sequence_len, vocab]
    loss = F.cross_entropy(output.logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss, output.router_logits if options else ()


def _balance_term(model: Any, routed: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """What the routers' logits add to the loss; 0 where there is none."""
    if not routed:
        return 0.0
    losses = [balance_loss(one, model.config.num_experts_per_tok) for one in routed]
    return float(model.config.router_aux_loss_coef) * torch.stack(losses).mean()


def _learning_rate_share(step: int, num_steps: int) -> float:
    """A short warm-up, a plateau, and a straight line to zero over the last 40%."""
    return min(1.0, (step + 1) / 30, (num_steps - step) / (0.4 * num_steps))
