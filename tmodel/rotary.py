"""Rotary positions: by how much a token's place turns its queries and keys.

config.json names a kind, `rope_type`, and its numbers. Each kind is a class here whose fields are its keys. The
frequencies are computed in float32 by the torch operations of transformers' ROPE_INIT_FUNCTIONS, so that they are equal
to the bit: published checkpoints were trained with these, and near position 10,000 an exact angle is up to 7e-4 radians
away, which is a different model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from tmodel.json_files import ConfigError

_ROWS_AT_ONCE = 2**14
"""Of a table, in the making: angles are float64, and there are several of each for a while."""

Length = Annotated[int, Field(gt=1, le=2**24)]
Factor = Annotated[float, Field(ge=1e-3, le=1e6)]
"""A ratio, a number of turns, or a scale. Published ones lie between 0.1 and 100; with these bounds every frequency is
finite, and none is 0, in float32."""


class RopeParameters(BaseModel):
    """The kind `default`: frequency i is theta^(-2i/dim).

    Source: Su et al., RoFormer, 2021, section 3.4.2.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rope_theta: float = Field(gt=1, le=1e15)
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)

    def inverse_frequencies(self, dim: int, length: int) -> torch.Tensor:
        """Radians by which each pair of dims turns from one position to the next.

        Args:
            dim: Dims that turn, R.
            length: Tokens of the longest sequence that the model was made for.

        Returns:
            [R/2], float32.
        """
        return 1.0 / self._periods(dim)

    def table_scale(self, length: int) -> float:
        """What cos and sin are multiplied by; scores of queries and keys change by its square."""
        return 1.0

    def check(self, dim: int) -> None:
        """Raise ConfigError where the numbers do not fit `dim` dims."""

    def _periods(self, dim: int) -> torch.Tensor:
        """Positions per radian of each pair, theta^(2i/dim): [dim/2], float32."""
        return self.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


class LinearRope(RopeParameters):
    """All frequencies are divided, as if positions lay closer together.

    Source: Chen et al., Extending Context Window via Position Interpolation, 2023.
    """

    factor: Factor

    def inverse_frequencies(self, dim: int, length: int) -> torch.Tensor:
        return super().inverse_frequencies(dim, length) / self.factor


class Llama3Rope(RopeParameters):
    """Slow frequencies are divided, fast ones stay, and those between are blended.

    Source: Llama 3.1's own code; Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.4.2.

    Attributes:
        factor: What the slow ones are divided by.
        low_freq_factor: Turns in the original length at and below which a frequency is slow.
        high_freq_factor: Turns above which it is fast.
        original_max_position_embeddings: The longest sequence before the scaling; None is the model's own.
    """

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Length | None = None

    def inverse_frequencies(self, dim: int, length: int) -> torch.Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        original = self.original_max_position_embeddings or length
        frequencies = super().inverse_frequencies(dim, length)
        wavelengths = 2 * math.pi / frequencies
        slow, fast = wavelengths > original / low, wavelengths < original / high
        divided = torch.where(slow, frequencies / self.factor, frequencies)
        kept = (original / wavelengths - low) / (high - low)  # the share that is not divided
        blended = (1 - kept) * frequencies / self.factor + kept * frequencies
        return torch.where(slow | fast, divided, blended)

    def check(self, dim: int) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_parameters: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


class YarnRope(RopeParameters):
    """Frequencies that turn seldom in the original length are divided, those that turn often stay, a ramp lies between.

    Source: Peng et al., YaRN, 2023, section 3.

    Attributes:
        factor: What the slow ones are divided by; None is the model's longest sequence over the original one.
        original_max_position_embeddings: The longest sequence before the scaling; None is the model's own.
        attention_factor: What cos and sin are multiplied by; None is 0.1 mscale ln(factor) + 1, see section 3.4.
        beta_fast: Turns at which the ramp begins.
        beta_slow: Turns at which it ends.
        mscale: With `mscale_all_dim` it makes the attention factor a ratio of two.
        mscale_all_dim: The ratio's denominator.
        truncate: Whether the ramp begins and ends at whole pairs of dims.
    """

    factor: Factor | None = None
    original_max_position_embeddings: Length | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: float | None = Field(default=None, ge=0, le=1e6)
    mscale_all_dim: float | None = Field(default=None, ge=0, le=1e6)
    truncate: bool = True

    def inverse_frequencies(self, dim: int, length: int) -> torch.Tensor:
        periods = self._periods(dim)
        stretched = 1.0 / (self._factor(length) * periods)
        begin, end = self._ramp(dim, length)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
        kept = 1 - ramp
        return stretched * (1 - kept) + 1.0 / periods * kept

    def table_scale(self, length: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self._factor(length)
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(factor, self.mscale) / _yarn_scale(factor, self.mscale_all_dim)
        return _yarn_scale(factor, 1)

    def _factor(self, length: int) -> float:
        return self.factor or length / (self.original_max_position_embeddings or length)

    def _ramp(self, dim: int, length: int) -> tuple[float, float]:
        """The pairs at which the ramp begins and ends."""
        original = self.original_max_position_embeddings or length

        def pair_of(turns: float) -> float:
            """The pair, a fraction too, that makes so many turns in the original length."""
            return (dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(self.rope_theta))

        begin, end = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        return begin, end + 0.001 if begin == end else end


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class LongRope(RopeParameters):
    """Each frequency is divided by a number of its own, out of one of two lists.

    transformers takes the short list for a forward pass that ends within the original length, and the long one for
    any other, so that keys in a cache may be of either. Here a model has one list: the long one wherever its longest
    sequence goes beyond the original length.

    Source: Ding et al., LongRoPE, 2024, section 3.3.

    Attributes:
        short_factor: dim/2 divisors.
        long_factor: dim/2 divisors.
        original_max_position_embeddings: The longest sequence before the scaling; None is the model's own.
        factor: By how much sequences became longer; None is the model's longest one over the original one.
        attention_factor: What cos and sin are multiplied by; None is sqrt(1 + ln(factor) / ln(original length)).
    """

    short_factor: list[Factor]
    long_factor: list[Factor]
    original_max_position_embeddings: Length | None = None
    factor: Factor | None = None
    attention_factor: Factor | None = None

    def inverse_frequencies(self, dim: int, length: int) -> torch.Tensor:
        chosen = self.long_factor if length > self._original(length) else self.short_factor
        return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * self._periods(dim))

    def table_scale(self, length: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self._original(length)
        factor = self.factor or length / original
        if factor <= 1.0 or original == 1:  # a single position is not turned
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def check(self, dim: int) -> None:
        for name, divisors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(divisors) != dim // 2:
                raise ConfigError(
                    f"rope_parameters: {name} has {len(divisors)} numbers, {dim} rotary dims take {dim // 2}"
                )

    def _original(self, length: int) -> int:
        return self.original_max_position_embeddings or length


ROPE_KINDS: Mapping[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
"""By `rope_type`. Not here: `dynamic`, whose frequencies change as a sequence grows, under keys that are cached; and
`proportional`, which no architecture of the house has."""


@dataclass(frozen=True)
class Rope:
    """Turns the first `dim` dims of a head by position * frequency, dim i paired with i + dim/2."""

    dim: int
    parameters: RopeParameters

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"rotary_dim is {self.dim}; it counts pairs of dims, so it must be even and at least 2")
        self.parameters.check(self.dim)

    def tables(
        self, length: int, positions: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the angles at positions 0 to positions - 1, each [positions, dim/2].

        Args:
            length: Tokens of the longest sequence that the model was made for; scaled kinds depend on it.
            positions: Tokens of the longest sequence that it is asked for.
            dtype: Of the model. The tables are float32 for float32, float16 and bfloat16 (in half precision they would
                misplace distant tokens), float64 for float64.
            device: Where the tables lie.
        """
        # The angles are rounded to float32 in every dtype, as transformers computes them.
        frequencies, scale = self.parameters.inverse_frequencies(self.dim, length), self.parameters.table_scale(length)
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = (torch.empty((positions, self.dim // 2), dtype=kept, device=device) for _ in range(2))
        for places in torch.arange(positions, dtype=torch.float32).split(_ROWS_AT_ONCE):
            angles = torch.outer(places, frequencies).double()  # [places, dim/2]
            rows = slice(int(places[0]), int(places[0]) + len(places))
            cos[rows], sin[rows] = angles.cos() * scale, angles.sin() * scale
        return cos, sin
