"""GPTQ, as GPTQModel and AutoGPTQ write it: Frantar et al., 2023, "GPTQ".

    qweight [K * bits / 32, N] int32   codes along K, a stream of bits
    qzeros  [G, N * bits / 32] int32   zero-points along N; format v1 ("gptq") stores each less one, v2 as it is
    scales  [G, N]                     W[n, k] = (code - zero) * scale, of group g_idx[k]
    g_idx   [K] int32                  k // group_size, or with desc_act the groups as the activations ordered them

v1 cannot hold a zero-point of 0: its 2**bits - 1 stands for 2**bits. The version decides every weight, and metadata
sometimes names the wrong one. Where all zero-points of a tensor are those of a symmetric file, the words show the
version (at 4 bits 0x77777777 is v1, 0x88888888 v2). The reader trusts these words for every tensor of the checkpoint,
and warns (FormatWarning) where the metadata disagrees. Where no tensor shows it, the metadata decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from tkernels.quantized.slicing import zeros_of
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import (
    FormatWarning,
    Scheme,
    check_bits,
    check_group_size,
    check_scheme,
    check_zeros_fit,
    compute_group_indices,
    drop_symmetric_zeros,
    invert_permutation,
    make_dense_layer_error,
    pack_by_parts,
    read_permutation,
    read_values,
    read_words,
    refuse_adapter,
)
from tmodel.formats.bitstream import num_words, pack_stream, unpack_stream
from tmodel.formats.overrides import Dynamic, check_dynamic, find_override, override
from tmodel.json_files import ConfigError
from tmodel.weights import Checkpoint, WeightError

_OVERRIDES = ("bits", "group_size", "desc_act", "sym", "pack_dtype")
CheckpointFormat = Literal["gptq", "gptq_v2"]
_ADDED: dict[CheckpointFormat, int] = {"gptq": 1, "gptq_v2": 0}  # to a stored zero-point
_BY_ADDED: dict[int, CheckpointFormat] = {1: "gptq", 0: "gptq_v2"}
_MIN_EVIDENCE = 64
"""This many equal zero-points are no accident, even in a file that does not call itself symmetric."""


class GPTQ(BaseModel):
    """The settings that decide what is decoded. The rest of a config (damp_percent, meta, ...) was for the quantizer.

    Attributes:
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.
        desc_act: The activations ordered the inputs, so that g_idx is no plain count.
        sym: All zero-points are 2**(bits - 1).
        checkpoint_format: "gptq" (v1) or "gptq_v2".
        format: Another name of the same setting; transformers writes both. It is kept only where the two contradict
            each other: the checkpoint is refused then, unless its words show which is right.
        lm_head: Whether the head is quantized too.
        dynamic: What differs from layer to layer, see `overrides`.
        modules_in_block_to_quantize: Where given, the only layers that are quantized, by the last parts of their names.
        pack_dtype: "int32".
        is_marlin_format: false.
        adapter: None; a LoRA that GPTQModel keeps beside the weights is not applied.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: CheckpointFormat = "gptq"
    format: CheckpointFormat | None = None
    lm_head: bool = False
    dynamic: Dynamic | None = None
    modules_in_block_to_quantize: list[list[str]] | None = None
    pack_dtype: Literal["int32"] = "int32"
    is_marlin_format: Literal[False] = False
    adapter: None = None

    @field_validator("bits", mode="before")
    @classmethod
    def _check_bits(cls, bits: Any) -> int:
        return check_bits(bits)

    @field_validator("adapter", mode="before")
    @classmethod
    def _check_adapter(cls, adapter: Any) -> None:
        refuse_adapter(adapter)

    @model_validator(mode="before")
    @classmethod
    def _merge_format_names(cls, raw: dict[str, Any]) -> dict[str, Any]:
        known, other = raw.get("checkpoint_format"), raw.get("format")
        if other not in get_args(CheckpointFormat) or known not in (None, other):
            return dict(raw)
        return {**raw, "checkpoint_format": other, "format": None}

    @model_validator(mode="after")
    def _check_groups_and_overrides(self) -> GPTQ:
        check_group_size(self.group_size, self.bits)
        check_dynamic(self.dynamic, self._apply_overrides)
        return self

    def _apply_overrides(self, overrides: Mapping[str, Any]) -> GPTQ:
        return override(self, overrides, _OVERRIDES)

    def find_settings(self, layer: str) -> GPTQ | None:
        """The settings of one layer with overrides applied; None where it is dense."""
        if layer == "lm_head" and not self.lm_head:
            return None
        found = find_override(self.dynamic, layer)
        if found is not None:
            is_dense, overrides = found
            return None if is_dense else self._apply_overrides(overrides)
        named = [name for names in self.modules_in_block_to_quantize or [] for name in names]
        if named and not any(layer.endswith(f".{name}") for name in named):
            return None
        return self

    def scheme(self, layer: str) -> Scheme | None:
        settings = self.find_settings(layer)
        if settings is None:
            return None
        # With one group for all inputs, their order changes nothing.
        return Scheme(settings.bits, settings.group_size, permuted=settings.desc_act and settings.group_size != -1)

    def _require_quantized(self, layer: str) -> tuple[GPTQ, Scheme]:
        settings, scheme = self.find_settings(layer), self.scheme(layer)
        if settings is None or scheme is None:
            raise make_dense_layer_error(layer)
        return settings, scheme

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)
        if outputs * scheme.bits % 32:
            raise ConfigError(f"{layer}: {outputs} zero-points of {scheme.bits} bits do not fill whole words")

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        settings, scheme = self._require_quantized(layer)
        bits, groups = settings.bits, scheme.num_groups(inputs)
        rows, columns = num_words(inputs, bits), num_words(outputs, bits)
        words = read_words(checkpoint, f"{layer}.qweight", (rows, outputs), f"[K * {bits} / 32, N]")
        scales = read_values(checkpoint, f"{layer}.scales", (groups, outputs), "[K / group_size, N]")
        stored = read_words(checkpoint, f"{layer}.qzeros", (groups, columns), f"[K / group_size, N * {bits} / 32]")
        added = _ADDED[
            checkpoint.compute_once((self.method, self.model_dump_json()), lambda: self._detect_format(checkpoint))
        ]
        zero_points = unpack_stream(stored, 1, bits, outputs)
        zeros = settings.decode_zero_points(checkpoint, f"{layer}.qzeros", zero_points, added)
        permutation = settings._read_permutation(checkpoint, f"{layer}.g_idx", inputs)
        group_size = inputs // groups
        if permutation is None and bits != 3:  # QuantizedWeight has the same words
            return QuantizedWeight(words, scales, zeros, bits, group_size)
        places = slice(None) if permutation is None else permutation.long()
        packed, high = pack_by_parts(lambda part: unpack_stream(words[:, part], 0, bits, inputs)[places], outputs, bits)
        return QuantizedWeight(packed, scales, zeros, bits, group_size, high=high, permutation=permutation)

    def decode_zero_points(
        self, checkpoint: Checkpoint, name: str, stored: torch.Tensor, added: int
    ) -> torch.Tensor | None:
        """Decodes stored zero-points and checks them against `sym`.

        Args:
            checkpoint: Theirs, for the message.
            name: Of their tensor, for the message.
            stored: [G, N] uint8, as unpacked.
            added: To each stored one, 1 in v1 and 0 in v2.

        Returns:
            [G, N] int16; None where all are 2**(bits - 1).

        Raises:
            WeightError: `sym` is true, and they are not all 2**(bits - 1).
        """
        zeros, middle = drop_symmetric_zeros(stored.short() + added, self.bits), 2 ** (self.bits - 1)
        if self.sym and zeros is not None:
            raise checkpoint.error(
                name,
                f"holds zero-points from {int(stored.min())} to {int(stored.max())}, but sym is true: all must be "
                f"{middle - 1} (checkpoint_format gptq, v1) or {middle} (gptq_v2)",
            )
        return zeros

    def _detect_format(self, checkpoint: Checkpoint) -> CheckpointFormat:
        """The format of every tensor of the checkpoint: the one that some tensor's words show, else the config's.

        A checkpoint has one format, which most tensors' words do not show. So all are read before the first is decoded.
        """
        evidence = self._find_evidence(checkpoint)
        named = [self.checkpoint_format] if self.format is None else [self.checkpoint_format, self.format]
        if not evidence and len(named) == 1:
            return named[0]
        if not evidence:
            raise WeightError(
                f"{checkpoint.directory}: quantization_config says checkpoint_format {named[0]} and format {named[1]}, "
                "and no qzeros are those of a symmetric weight, which would tell: one of the two must go"
            )
        (detected, tensors), *others = evidence.items()
        name, bits, value = tensors[0]
        if others:
            other, ((its_name, its_bits, its_value), *_) = others[0]
            raise checkpoint.error(
                name,
                f"is of checkpoint_format {detected} (all {value} at {bits} bits), but {its_name!r} of {other} (all "
                f"{its_value} at {its_bits} bits): a checkpoint must be of one",
            )
        if named != [detected]:
            both = " and ".join(map("{} ({})".format, named, ("checkpoint_format", "format")))
            of = f"not {named[0]} as" if len(named) == 1 else f"of {both}"
            warnings.warn(
                checkpoint.error(
                    name,
                    f"is of checkpoint_format {detected}, {of} its config says: all zero-points are stored as {value}, "
                    f"which is the middle, {2 ** (bits - 1)}, in {detected} alone. Tensors that tell so: "
                    f"{len(tensors)}. The whole checkpoint is read as {detected}",
                ).args[0],
                FormatWarning,
                stacklevel=2,
            )
        return detected

    def _find_evidence(self, checkpoint: Checkpoint) -> dict[CheckpointFormat, list[tuple[str, int, int]]]:
        """Format -> the tensors whose words show it, each with its bits and the value of all its zero-points."""
        evidence: dict[CheckpointFormat, list[tuple[str, int, int]]] = {}
        for name in checkpoint.names:
            layer, _, part = name.rpartition(".")
            settings = self.find_settings(layer) if part == "qzeros" else None
            words = None if settings is None else checkpoint.peek(name)
            if settings is None or words is None or words.dtype != torch.int32 or words.dim() != 2 or not words.numel():
                continue  # `read` refuses it
            stored = unpack_stream(words, 1, settings.bits, words.shape[1] * 32 // settings.bits)
            by_words = settings.detect_tensor_format(stored)
            if by_words is not None:
                evidence.setdefault(by_words, []).append((name, settings.bits, int(stored[0, 0])))
        return evidence

    def detect_tensor_format(self, stored: torch.Tensor) -> CheckpointFormat | None:
        """The format that stored zero-points [G, N] show; None where they are not those of a symmetric file."""
        first = int(stored.reshape(-1)[0])
        is_evidence = self.sym or stored.numel() >= _MIN_EVIDENCE
        if not is_evidence or not bool((stored == first).all()):
            return None
        return _BY_ADDED.get(2 ** (self.bits - 1) - first)

    def _read_permutation(self, checkpoint: Checkpoint, name: str, inputs: int) -> torch.Tensor | None:
        group_size = inputs if self.group_size == -1 else self.group_size
        if not self.desc_act and name not in checkpoint:
            return None
        permutation = read_permutation(checkpoint, name, inputs, group_size)
        if permutation is not None and not self.desc_act:
            raise checkpoint.error(name, "puts inputs into groups out of their order, but desc_act is false")
        return permutation

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        settings, scheme = self._require_quantized(layer)
        check_scheme(weight, layer, scheme)
        zeros, added = zeros_of(weight), _ADDED[settings.checkpoint_format]
        if settings.sym and weight.zeros is not None:
            raise ValueError(f"{layer}: it has zero-points, but sym is true")
        check_zeros_fit(layer, zeros, settings.bits, added)
        stored = zeros - added
        if settings.detect_tensor_format(stored) not in (None, settings.checkpoint_format):
            raise ValueError(
                f"{layer}: its zero-points are all {int(zeros[0, 0])}, which readers would take for a symmetric "
                f"weight's in the other format: write another checkpoint_format than {settings.checkpoint_format}"
            )
        assert weight.scales is not None, "the scheme is uniform"
        return {
            "qweight": pack_stream(unpack_codes(weight)[invert_permutation(weight)], 0, settings.bits),
            "qzeros": pack_stream(stored, 1, settings.bits),
            "scales": weight.scales,
            "g_idx": compute_group_indices(weight),
        }

    def config(self) -> dict[str, Any]:
        return {"quant_method": self.method, **self.model_dump(exclude_none=True, exclude={"is_marlin_format"})}
