"""What a model computes of some sequences, place by place, and this engine's model read so.

A place is the input or the output of a linear layer, named as its weight is in the checkpoint: the names that every
implementation of a model shares, however its kernels are fused. Rows go on from one sequence to the next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

import tkernels
from experiments.divergence.listening import (
    Arguments,
    EnteredRange,
    EnteredRanges,
    Results,
    WrongCall,
    find_wrong,
    hear_kernels,
)
from tkernels.inputs import clone_inputs
from tkernels.launch import Kernel
from tkernels.selection import Choices
from tmodel import Batch, ModelConfig, allocate_kv_cache, load_model
from tmodel.kv_cache import state_kinds
from tsched.execution.placement import find_block_size
from tsched.options import EngineOptions
from tsched.resolved_options import ResolvedOptions

Place = tuple[str, Literal["input", "output"]]
"""A linear layer by its weight's name, "model.layers.1.mlp.down_proj", and which side of it."""

Token = tuple[int, int]
"""A sequence, and a place in it, both from 0."""

TOKEN_DIMS = ("T", "M", "B")
"""The axes that count a step's tokens: of decode rows each sequence has one."""


@dataclass(frozen=True)
class Reading:
    """What a model computed of some sequences, R rows: every token of the first, then of the next.

    Attributes:
        sequences: Their tokens.
        logits: [R, vocab].
        places: Place -> [R, width], in the order in which the model came to them.
    """

    sequences: Sequence[Sequence[int]]
    logits: torch.Tensor
    places: Mapping[Place, torch.Tensor]

    def token_of(self, row: int) -> Token:
        """Which token a row is."""
        for index, sequence in enumerate(self.sequences):
            if row < len(sequence):
                return index, row
            row -= len(sequence)
        raise IndexError(f"row {row} is past the last sequence")


@dataclass(frozen=True)
class FoundWrong:
    """A wrong call of a model, and where in the model it was.

    Attributes:
        call: The call.
        step: "prefill, first half" of the prompts, or "decode 3" of the third token after them.
        layer: "layer 1"; "" outside the layers.
        part: The linear layers that the call is of, "q_proj+k_proj+v_proj"; "" where it is of none.
        token: The row of the element that is furthest off; None where that is no token's.
    """

    call: WrongCall
    step: str
    layer: str
    part: str
    token: Token | None


Part = tuple[str, EnteredRange]
"""Linear layers as a model's ranges name them: the layer's name, and their own range."""


@dataclass
class _Step:
    """What was heard in one step."""

    name: str
    tokens: list[Token]
    logits: torch.Tensor
    inputs: dict[Part, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Part, torch.Tensor] = field(default_factory=dict)


class HeardModel:
    """A model whose kernels are heard while it reads prompts as one batch, and then what follows them.

    Args:
        directory: Gives the directory of its weights.
        config: Its configuration.
        choices: Its kernels.
        lengths: Of the prompts, in tokens.
        after: Tokens that follow each prompt.
        device: Where it runs.
        dtype: Of its weights.
        ops: Where kernels are chosen from.

    Attributes:
        wrong: The first call that the error rule does not allow; None where there is none yet.

    Raises:
        SelectionError: A kernel is unknown or unsupported here. No weights are loaded before `read`.
    """

    def __init__(
        self, directory: Callable[[], Path], config: ModelConfig, choices: Choices, *, lengths: Sequence[int],
        after: int, device: torch.device, dtype: torch.dtype, ops: tkernels.Registry,
    ) -> None:  # fmt: skip
        self._directory, self._config, self._after = directory, config, after
        self._device, self._dtype = device, dtype
        count, longest = len(lengths), max(lengths) + after
        options = EngineOptions(max_num_seqs=count, max_num_batched_tokens=sum(lengths), max_model_len=longest)
        self._block_size = find_block_size(None, device)
        self._width = -(-longest // self._block_size)  # blocks of a sequence
        self._num_blocks = count * self._width
        self._num_states = count if state_kinds(config.cache_kinds) else 0
        fitted = ResolvedOptions(options, longest, self._block_size, num_blocks=self._num_blocks)
        self._ranges = EnteredRanges()
        kernels = tkernels.select(
            choices, device=device, dtype=dtype, axes=fitted.kernel_axes(config), ops=ops, ranges=self._ranges
        )
        self._kernels = hear_kernels(kernels, self._hear)
        self._step = _Step("", [], torch.empty(0))
        self.wrong: FoundWrong | None = None

    @torch.inference_mode()
    def read(
        self,
        prompts: Sequence[Sequence[int]],
        given: Sequence[Sequence[int]] | None = None,
        advance: Callable[[str], None] = lambda step: None,
    ) -> Reading:
        """Reads the prompts in two steps, half of each in either, then a token of each a step.

        The second halves are read on top of what the cache has of the first, as the chunks of a long prompt are.

        Args:
            prompts: Of the lengths that the model was made ready for.
            given: The whole sequences; None adds the likeliest tokens to each prompt.
            advance: Hears each step's name at its end.
        """
        forward = self._load()
        texts = [list(prompt) for prompt in prompts]
        middles = [-(-len(text) // 2) for text in texts]
        steps = [self._take_step(forward, "prefill, first half", texts, [range(middle) for middle in middles])]
        advance(steps[-1].name)
        rest = [range(middle, len(text)) for middle, text in zip(middles, texts, strict=True)]
        if any(rest):
            steps.append(self._take_step(forward, "prefill, second half", texts, rest))
            advance(steps[-1].name)
        for count in range(1, self._after + 1):
            for index, text in enumerate(texts):
                last = (index, len(text) - 1)
                text.append(_likeliest(steps, last) if given is None else given[index][len(text)])
            new = [range(len(text) - 1, len(text)) for text in texts]
            steps.append(self._take_step(forward, f"decode {count}", texts, new))
            advance(steps[-1].name)
        return self._join(texts, steps)

    def _load(self) -> Callable[[Batch], torch.Tensor]:
        """The model with its weights and an empty cache."""
        device, dtype = self._device, self._dtype
        model = load_model(self._directory(), self._config, self._kernels, device=device, dtype=dtype)
        cache = allocate_kv_cache(
            self._config, self._num_blocks, self._block_size, self._num_states, device=device, dtype=dtype
        )
        return lambda batch: model(batch, cache)

    def _take_step(
        self,
        forward: Callable[[Batch], torch.Tensor],
        name: str,
        texts: Sequence[Sequence[int]],
        new: Sequence[range],
    ) -> _Step:
        """Reads the `new` places of each text: some of a prompt, or in a step of decode rows the one after it."""
        tokens = [(index, place) for index, places in enumerate(new) for place in places]
        self._step = step = _Step(name, tokens, torch.empty(0))
        reading = [index for index, places in enumerate(new) if places]
        context_lens = [new[index].stop for index in reading]
        num_decodes = len(reading) if name.startswith("decode") else 0
        starts = [0, *accumulate(len(new[index]) for index in reading[num_decodes:])]
        tables = [range(index * self._width, (index + 1) * self._width) for index in reading]
        places = {
            "token_ids": [texts[index][place] for index, place in tokens],
            "positions": [place for _, place in tokens],
            "slots": [index * self._width * self._block_size + place for index, place in tokens],
            "logit_indices": list(range(len(tokens))),
        }
        lengths: dict[str, Any] = {
            "block_tables": [list(row) for row in tables],
            "context_lens": context_lens,
            "cu_seqlens_q": starts,
        }
        tensors: dict[str, Any] = {
            **{name: torch.tensor(each, dtype=torch.int64, device=self._device) for name, each in places.items()},
            **{name: torch.tensor(each, dtype=torch.int32, device=self._device) for name, each in lengths.items()},
        }
        batch = Batch(
            **tensors,
            num_decodes=num_decodes,
            max_context_len=max(context_lens),
            state_slots=self._state_slots([(index, bool(new[index].start)) for index in reading]),
        )
        step.logits = forward(batch)
        return step

    def _state_slots(self, reading: Sequence[tuple[int, bool]]) -> torch.Tensor | None:
        """[2, B]: each sequence leaves a state of its own, and goes on from it where it has begun."""
        slots = [[index if has_begun else -1 for index, has_begun in reading], [index for index, _ in reading]]
        return torch.tensor(slots, device=self._device) if self._num_states else None

    def _hear(self, kernel: Kernel, arguments: Arguments, results: Results) -> None:
        """Keeps what a linear layer got and gave, and judges the call unless one before it was wrong."""
        inside, part, step = self._ranges.innermost("layer"), self._ranges.innermost("part"), self._step
        layer = "" if inside is None else inside.name
        if part is not None:  # a layer's first call has its input, its last has its output
            step.inputs.setdefault((layer, part), next(iter(arguments.values())).clone())
            step.outputs[layer, part] = next(iter(results.values())).clone()
        if self.wrong is None and (wrong := find_wrong(kernel, arguments, results)) is not None:
            kept = replace(wrong, arguments=clone_inputs(wrong.arguments))  # later steps go on writing the caches
            title = "" if part is None else part.name
            self.wrong = FoundWrong(kept, step.name, layer, title, self._token_of(wrong))

    def _token_of(self, wrong: WrongCall) -> Token | None:
        """Whose row the worst element of a wrong result is in."""
        contract = wrong.kernel.variant.contract
        rule = contract.outputs.get(wrong.output) or contract.arguments[wrong.output]
        dims, index = getattr(rule, "shape", ()), wrong.verdict.index
        return self._step.tokens[index[0]] if index and dims and dims[0].name in TOKEN_DIMS else None

    def _join(self, texts: Sequence[Sequence[int]], steps: Sequence[_Step]) -> Reading:
        """The steps' rows in the order of sequences."""
        rows = [token for step in steps for token in step.tokens]
        order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=self._device)
        names = self._linear_names()
        places: dict[Place, torch.Tensor] = {}
        for layer, part in steps[0].inputs:
            of_title = names.get((layer, part.name))  # two of a layer may have one title: they come in their order
            linears, outputs = of_title.pop(0) if of_title else ((part.name,), None)
            given, made = (
                torch.cat([heard[layer, part] for heard in each])[order]
                for each in ([step.inputs for step in steps], [step.outputs for step in steps])
            )
            parts = made.split(outputs or made.shape[1], dim=1)
            places |= {(name, "input"): given for name in linears}
            places |= {(name, "output"): one for name, one in zip(linears, parts, strict=True)}
        return Reading(texts, torch.cat([step.logits for step in steps])[order], places)

    def _linear_names(self) -> dict[tuple[str, str], list[tuple[tuple[str, ...], tuple[int, ...] | None]]]:
        """(layer, title) as ranges name them -> names and widths of the linear layers, of each that has that title, in
        the order of computation. One may be of a part of a shape.
        """
        found: dict[tuple[str, str], list[tuple[tuple[str, ...], tuple[int, ...] | None]]] = {}
        prefix = f"{self._config.architecture.layers}."
        for shape in (one for one in self._config.linears() if not one.num_experts):  # experts are one kernel's
            inside = shape.names[0].removeprefix(prefix) if shape.names[0].startswith(prefix) else ""
            layer = f"layer {inside.split('.')[0]}" if inside else ""
            for start in range(len(shape.names)):
                for stop in range(start + 1, len(shape.names) + 1):
                    named = shape.names[start:stop], shape.outputs[start:stop]
                    found.setdefault((layer, shape.title(start, stop)), []).append(named)
        listed = {name for shape in self._config.linears() for name in shape.names}
        for tensor, size in self._config.tensors().items():
            name = tensor.removesuffix(".weight")
            is_matrix = name != tensor and len(size) == 2
            if tensor.startswith(prefix) and is_matrix and name not in listed:  # a router, which is always dense
                place = f"layer {name.removeprefix(prefix).split('.')[0]}", name.rpartition(".")[2]
                found.setdefault(place, []).append(((name,), (size[0],)))
        return found


def _likeliest(steps: Sequence[_Step], token: Token) -> int:
    """The token that is likeliest after another."""
    step = next(step for step in reversed(steps) if token in step.tokens)
    return int(step.logits[step.tokens.index(token)].argmax())
