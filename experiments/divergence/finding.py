"""Reads the same tokens with two arms and finds where they part: in logits, place by place, and the first fault.

An arm is a choice of kernels, or transformers. Two right arms differ too, for each rounds in places of its own; what
one place differs by flows on into all after it. So each is judged on its own inputs: a call of a kernel by the op's
definition in float64, and a part of the model by what transformers' makes of the same inputs in float64, beside
transformers' own error there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

import tkernels
from experiments.divergence.captured_call import MODEL_SLACK
from experiments.divergence.reading import FoundWrong, HeardModel, Place, Reading, Token
from experiments.divergence.transformers_reading import load_both, read_transformers
from tkernels.selection import Choices
from tkernels.verification.accuracy import judge
from tmodel import ModelPlan

Arm = Choices | None
"""The kernels that are chosen, or None for transformers."""

LETTERS = ("A", "B")


@dataclass(frozen=True)
class Logits:
    """How the logits of two arms differ, over `rows` tokens.

    Attributes:
        rows: Tokens.
        top1: For how many of them both find the same token likeliest.
        top5: For how many both have the same five likeliest.
        first_other: The first token after which the likeliest differs; None where it never does.
        likeliest: There, A's and B's.
        leads: There, by how much each arm's logit of its own is above that of the other's.
        largest: The largest difference of a logit.
        largest_at: After which token.
        largest_of: Of which token's logit.
    """

    rows: int
    top1: int
    top5: int
    first_other: Token | None
    likeliest: tuple[int, int] | None
    leads: tuple[float, float] | None
    largest: float
    largest_at: Token
    largest_of: int


@dataclass(frozen=True)
class Difference:
    """How far two arms are apart at a place; a distance is the rms of a difference over the rms of B.

    Attributes:
        place: "model.layers.1": what its first linear layer gets. A layer outside them by its own name, or "logits".
        largest: The largest difference of an element.
        apart: A's distance from B.
        from_exact: A's and B's distance from transformers in float64; None where transformers is no arm.
    """

    place: str
    largest: float
    apart: float
    from_exact: tuple[float, float] | None


@dataclass(frozen=True)
class WrongPart:
    """The first place that this engine computes otherwise than transformers from the same inputs.

    Attributes:
        place: The linear layer, and the side of it, where the difference shows.
        token: The row of the element that is furthest off.
        element: Its column.
        expected: What transformers makes there of this engine's own inputs, in float64.
        got: What this engine has there.
        ratio: The error over what the rule allows, of the largest or of the rms.
    """

    place: Place
    token: Token
    element: int
    expected: float
    got: float
    ratio: float


@dataclass(frozen=True)
class Rounding:
    """How often this engine and transformers round the same inputs to other values.

    Attributes:
        place: The linear layer and side, of all layers together: "model.layers.*.self_attn.o_proj".
        elements: Values there.
        other: Those of them that differ.
    """

    place: Place
    elements: int
    other: int


@dataclass(frozen=True)
class Beside:
    """This engine beside transformers.

    Attributes:
        theirs: What transformers computed.
        exact: What it computed in float64.
        wrong_part: The first part of ours that is wrong on its own inputs.
        rounding: Place by place, on our inputs.
    """

    theirs: Reading
    exact: Reading
    wrong_part: WrongPart | None
    rounding: tuple[Rounding, ...]


@dataclass(frozen=True)
class Divergence:
    """What was found.

    Attributes:
        sequences: The tokens that both read.
        logits: How their logits differ.
        differences: Layer by layer.
        wrong_calls: Letter of an arm -> the first call of its kernels that is wrong on its own arguments.
        wrong_part: Beside transformers, the first part that is wrong on its own inputs.
        rounding: Beside transformers, what is rounded otherwise.
    """

    sequences: Sequence[Sequence[int]]
    logits: Logits
    differences: tuple[Difference, ...]
    wrong_calls: Mapping[str, FoundWrong]
    wrong_part: WrongPart | None = None
    rounding: tuple[Rounding, ...] = ()

    @property
    def is_rounding(self) -> bool:
        """Whether nothing is wrong: all that differs is rounding."""
        return not self.wrong_calls and self.wrong_part is None


def find_divergence(
    arms: tuple[Arm, Arm], model: ModelPlan, prompts: Sequence[Sequence[int]], max_tokens: int, *,
    device: torch.device, dtype: torch.dtype, ops: tkernels.Registry, advance: Callable[[str], None],
) -> Divergence:  # fmt: skip
    """Reads prompts with both arms, and the tokens that the first arm of kernels finds likeliest after them.

    Args:
        arms: A and B, at most one of them transformers.
        model: What both load.
        prompts: Tokens.
        max_tokens: So many are added to each prompt.
        device: Where both run.
        dtype: Of both.
        ops: Where kernels are chosen from.
        advance: Hears what is read, at the end of each step.
    """
    heard = {
        letter: HeardModel(
            model.directory, model.config, choices, lengths=list(map(len, prompts)), after=max_tokens, device=device,
            dtype=dtype, ops=ops,
        )
        for letter, choices in zip(LETTERS, arms, strict=True)
        if choices is not None
    }  # fmt: skip
    readings: dict[str, Reading] = {}
    for letter, one in heard.items():
        given = next((reading.sequences for reading in readings.values()), None)
        readings[letter] = one.read(prompts, given, partial(_tell, advance, letter))
    wrong_calls = {letter: one.wrong for letter, one in heard.items() if one.wrong is not None}
    beside = None
    if None in arms:
        (ours,) = readings.values()
        beside = compare_with_transformers(ours, *load_both(model.directory(), device, dtype), advance)
        readings[LETTERS[arms.index(None)]] = beside.theirs
    a, b = (readings[letter] for letter in LETTERS)
    found = a.sequences, compare_logits(a, b), compare_places(a, b, None if beside is None else beside.exact)
    if beside is None:
        return Divergence(*found, wrong_calls)
    return Divergence(*found, wrong_calls, beside.wrong_part, beside.rounding)


def _tell(advance: Callable[[str], None], letter: str, step: str) -> None:
    advance(f"{letter}, {step}")


def compare_with_transformers(
    ours: Reading, model: object, exact_model: object, advance: Callable[[str], None] = lambda step: None
) -> Beside:
    """Reads our tokens with transformers' model, and judges every part of ours on its own inputs.

    Args:
        ours: What this engine computed.
        model: transformers' model.
        exact_model: The same in float64.
        advance: Hears what is read, when it has been.
    """
    names = list(dict.fromkeys(name for name, _ in ours.places))
    readings = []
    for what, one, given in (
        ("transformers", model, None),
        ("transformers in float64", exact_model, None),
        ("transformers on our inputs", model, ours.places),
        ("transformers in float64 on our inputs", exact_model, ours.places),
    ):
        readings.append(read_transformers(one, ours.sequences, names, given))
        advance(what)
    theirs, exact, natural, expected = readings
    return Beside(theirs, exact, find_wrong_part(ours, expected, natural), count_rounding(ours, natural))


def count_rounding(ours: Reading, natural: Reading) -> tuple[Rounding, ...]:
    """Counts what transformers makes other values of, on our own inputs."""
    counts: dict[Place, list[int]] = {}
    for (name, side), got in ours.places.items():
        if (name, side) in natural.places:
            count = counts.setdefault((re.sub(r"\.\d+\.", ".*.", name, count=1), side), [0, 0])
            count[0] += got.numel()
            count[1] += int((got != natural.places[name, side].to(got.device)).sum())
    return tuple(Rounding(place, elements, other) for place, (elements, other) in counts.items())


def find_wrong_part(ours: Reading, expected: Reading, natural: Reading) -> WrongPart | None:
    """Judges each place by the error rule.

    Args:
        ours: What is judged.
        expected: In float64, what comes there of our own inputs.
        natural: The same at our dtype, by transformers: its error is what is natural.
    """
    for place, got in ours.places.items():
        if place not in expected.places:
            continue
        verdict = judge(got, expected.places[place], natural.places[place], MODEL_SLACK)
        if not verdict.ok:
            row, element = verdict.index
            ratio = max(verdict.max_ratio, verdict.rms_ratio or 0.0)
            return WrongPart(place, ours.token_of(row), element, verdict.expected, verdict.got, ratio)
    return None


def compare_logits(a: Reading, b: Reading) -> Logits:
    """Compares row by row."""
    first, second = a.logits.double(), b.logits.double().to(a.logits.device)  # [R, vocab]
    best = torch.stack((first.argmax(1), second.argmax(1)))  # [2, R]
    fives = [logits.topk(min(5, logits.shape[1])).indices.sort(dim=1).values for logits in (first, second)]
    other = (best[0] != best[1]).nonzero().flatten().tolist()
    apart = (first - second).abs()
    row, token = divmod(int(apart.argmax()), apart.shape[1])
    likeliest, leads = None, None
    if other:
        mine, theirs = (int(one) for one in best[:, other[0]])
        likeliest = mine, theirs
        mine_by, theirs_by = (logits[other[0], mine] - logits[other[0], theirs] for logits in (first, second))
        leads = float(mine_by), -float(theirs_by)
    return Logits(
        rows=len(first),
        top1=len(first) - len(other),
        top5=int((fives[0] == fives[1]).all(dim=1).sum()),
        first_other=a.token_of(other[0]) if other else None,
        likeliest=likeliest,
        leads=leads,
        largest=float(apart[row, token]),
        largest_at=a.token_of(row),
        largest_of=token,
    )


def compare_places(a: Reading, b: Reading, exact: Reading | None) -> tuple[Difference, ...]:
    """Compares what the first linear layer of each layer gets, and the logits."""
    entries: dict[str, Place] = {}
    for place in a.places:
        if place in b.places:
            entries.setdefault(_layer_of(place[0]), place)
    found = []
    for name, place in entries.items():
        exactly = None if exact is None else exact.places[place]
        found.append(_compare(name, a.places[place], b.places[place], exactly))
    return (*found, _compare("logits", a.logits, b.logits, None if exact is None else exact.logits))


def _layer_of(name: str) -> str:
    """ "model.layers.1" of "model.layers.1.mlp.down_proj"; a name without a number is its own."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return name if match is None else match[1]


def _compare(name: str, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor | None) -> Difference:
    """Compares tensors [R, width]."""
    one, other = a.double(), b.double().to(a.device)
    size = _rms(other)

    def distance(from_where: torch.Tensor, to_where: torch.Tensor) -> float:
        return _rms(from_where - to_where) / size if size else float(not torch.equal(from_where, to_where))

    from_exact = None if exact is None else (distance(one, exact.to(a.device)), distance(other, exact.to(a.device)))
    return Difference(name, float((one - other).abs().max()), distance(one, other), from_exact)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
