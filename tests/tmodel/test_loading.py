"""From a directory to a model: what is refused, what is tied, ignored and sized, and how an architecture joins."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import tkernels
import tmodel.architectures
from tests.tmodel.conftest import CONFIG, WriteCheckpoint, checkpoint_tensors
from tests.tmodel.packed import Driver, in_chunks, load
from tkernels.selection import unsupported_in
from tmodel import (
    RANDOM_PRESETS,
    Batch,
    ConfigError,
    Limits,
    WeightError,
    allocate_kv_cache,
    find_model,
    kernel_axes,
    known_architectures,
    kv_bytes_per_block,
    load_config,
    load_model,
)
from tmodel.decoders.pre_norm import PreNormModel
from tmodel.random_weights import random_config
from tmodel.weights import Checkpoint

LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=8, num_blocks=32)


def logits(directory: Path) -> torch.Tensor:
    sequences = [torch.arange(11), torch.arange(20, 25)]
    return torch.cat(
        Driver(load(directory, torch.float32), sequences, torch.float32).run(in_chunks([11, 5], 4))
    )  # [16, vocab]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        ({"lm_head.weight": None}, r"tensor 'lm_head\.weight' is missing from model\.safetensors"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, r"unexpected tensor 'model\.layers\.2\.mlp"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, r"unexpected tensor .*q_proj\.bias"),
        (
            {"model.norm.weight": torch.ones(17)},
            r"'model\.norm\.weight' has shape \[17\].* asks for \[16\]",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_model_is_refused(
    write_checkpoint: WriteCheckpoint, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {name: tensor for name, tensor in {**checkpoint_tensors(CONFIG), **change}.items() if tensor is not None}
    directory = write_checkpoint(tensors)
    with pytest.raises(WeightError, match=message):
        load(directory, torch.float32)


def test_biases_are_required_where_the_config_has_them(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint(attention_bias=True)
    with pytest.raises(WeightError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"):
        load(directory, torch.float32)


def test_tied_weights_may_be_stored_once_or_twice(write_checkpoint: WriteCheckpoint) -> None:
    once = checkpoint_tensors({**CONFIG, "tie_word_embeddings": True})
    expected = logits(write_checkpoint(once, tie_word_embeddings=True))
    twice = {**once, "lm_head.weight": once["model.embed_tokens.weight"].clone()}
    assert torch.equal(logits(write_checkpoint(twice, tie_word_embeddings=True)), expected)
    assert torch.equal(logits(write_checkpoint(twice, tie_word_embeddings=False)), expected)
    twice["lm_head.weight"][3, 3] += 1
    directory = write_checkpoint(twice, tie_word_embeddings=True)
    with pytest.raises(WeightError, match="differs from the embedding"):
        load(directory, torch.float32)


def test_rotary_buffers_of_old_checkpoints_are_ignored(write_checkpoint: WriteCheckpoint) -> None:
    tensors = checkpoint_tensors(CONFIG)
    expected = logits(write_checkpoint(tensors))
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    assert torch.equal(logits(write_checkpoint({**tensors, **buffers})), expected)


def test_a_step_may_want_no_logits(write_checkpoint: WriteCheckpoint) -> None:
    model = load(write_checkpoint(), torch.float32)
    batch = Batch(
        token_ids=torch.arange(3),
        positions=torch.arange(3),
        slots=torch.arange(3),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        num_decodes=0,
        max_context_len=3,
        logit_indices=torch.empty(0, dtype=torch.int64),
    )
    cache = allocate_kv_cache(model.config, 1, 8, device="cpu", dtype=torch.float32)
    assert model(batch, cache).shape == (0, 40)
    assert all((cached[0, :3] != 0).all() and (cached[0, 3:] == 0).all() for pair in cache for cached in pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.arange(2)}, r"Batch\.positions has shape \(2,\), expected \(3,\)"),
        ({"context_lens": torch.ones(2)}, r"Batch\.context_lens has shape \(2,\), expected \(1,\)"),
        ({"num_decodes": 2}, r"Batch\.num_decodes is 2 with 3 tokens and 1 sequences"),
        ({"num_decodes": 1}, r"Batch\.cu_seqlens_q has 2 entries, expected 1"),
        ({"state_slots": torch.zeros(2, 2)}, r"Batch\.state_slots has shape \(2, 2\), expected \(2, 1\)"),
    ],
)
def test_a_batch_whose_parts_do_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    batch = Batch(
        token_ids=torch.arange(3),
        positions=torch.arange(3),
        slots=torch.arange(3),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        num_decodes=0,
        max_context_len=3,
        logit_indices=torch.arange(3),
    )
    assert dataclasses.replace(batch, state_slots=torch.zeros(2, 1)).num_prefills == 1
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(batch, **change)  # type: ignore[arg-type]


def test_the_cache_has_the_size_that_was_announced(write_checkpoint: WriteCheckpoint) -> None:
    config = load_config(write_checkpoint({}))
    cache = allocate_kv_cache(config, 5, 16, device="cpu", dtype=torch.bfloat16)
    assert [tuple(tensor.shape) for pair in cache for tensor in pair] == [(5, 16, 2, 16)] * 4
    assert sum(tensor.nbytes for pair in cache for tensor in pair) == 5 * kv_bytes_per_block(config, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="at least one block"):
        allocate_kv_cache(config, 0, 16, device="cpu", dtype=torch.bfloat16)


def test_kernels_are_asked_for_every_axis_that_their_support_depends_on(write_checkpoint: WriteCheckpoint) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 7}
    windowed = write_checkpoint({}, **windows, layer_types=["sliding_attention", "full_attention"])
    axes = kernel_axes(load_config(windowed), LIMITS)
    assert axes["paged_decode"]["window"] == (0, 7)
    for op, ranges in axes.items():
        contract = tkernels.OPS[op].contract
        assert set(ranges) <= set(contract.axis_by_name), op
        for name, variant in tkernels.OPS[op].variants.items():
            reason = unsupported_in(variant, ranges, torch.device("cpu"), torch.float32)
            assert "which the model does not give" not in (reason or ""), (op, name)


def test_layers_that_are_not_there_are_found_before_any_is_read(
    write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "_read_into", lambda *_: pytest.fail("a tensor is read"))
    directory = write_checkpoint(checkpoint_tensors(CONFIG), num_hidden_layers=4096)
    with pytest.raises(
        WeightError, match=r"tensor 'model\.layers\.2\.input_layernorm\.weight' is missing from model\.saf"
    ):
        load(directory, torch.float32)
    last = "model.layers.1.mlp.down_proj.weight"
    for wrong in (torch.ones(2, 2), torch.ones(16, 24).int()):
        directory = write_checkpoint({**checkpoint_tensors(CONFIG), last: wrong})
        with pytest.raises(WeightError, match=rf"tensor '{last}' (has shape|is stored as)"):
            load(directory, torch.float32)


def test_tables_of_positions_are_as_long_as_the_longest_sequence_that_is_served(
    write_checkpoint: WriteCheckpoint,
) -> None:
    directory = write_checkpoint(max_position_embeddings=2**24)
    model = load(directory, torch.float32, max_model_len=64)
    assert isinstance(model, PreNormModel)
    assert [tuple(table.shape) for table in model.rotation] == [(64, 8)] * 2


def test_an_unsupported_shape_is_refused_before_weights_are_read(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})  # no weights at all
    with pytest.raises(tkernels.SelectionError, match=r"kernels\.paged_decode: .*did you mean|kernels: .*'torch'"):
        load(directory, torch.float32, {"paged_decode": "torhc"})


NEW_ARCHITECTURE = """
from tmodel.architectures.qwen3 import Qwen3Config, decoder
from tmodel.decoders.pre_norm import pre_norm_architecture
ARCHITECTURE = pre_norm_architecture("Qwen4ForCausalLM", Qwen3Config, decoder)
"""


def test_an_architecture_joins_by_its_file_alone(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint({}, architectures=["Qwen4ForCausalLM"])
    with pytest.raises(ConfigError, match=r"unknown architecture 'Qwen4ForCausalLM'; known are: .*Qwen3ForCausalLM"):
        load_config(directory)
    (tmp_path / "qwen4.py").write_text(NEW_ARCHITECTURE)
    monkeypatch.setattr(tmodel.architectures, "__path__", [*tmodel.architectures.__path__, str(tmp_path)])
    before = list(known_architectures())
    known_architectures.cache_clear()
    try:
        assert list(known_architectures()) == [*before, "Qwen4ForCausalLM"]
        config = load_config(directory)
        assert config.num_layers == 2
        with pytest.raises(WeightError, match="'model.layers.0.input_layernorm.weight' is missing"):
            load_model(directory, config, None, device="cpu", dtype=torch.float32)  # type: ignore[arg-type]
    finally:
        known_architectures.cache_clear()


@pytest.mark.parametrize("gone", known_architectures())
def test_the_others_are_as_they_were_without_an_architectures_file(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(known_architectures())
    (folder,) = map(Path, tmodel.architectures.__path__)
    for file in folder.glob("*.py"):
        if f'"{gone}"' not in file.read_text():
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(tmodel.architectures, "__path__", [str(tmp_path)])
    known_architectures.cache_clear()
    try:
        left = dict(known_architectures())
        assert left == {name: one for name, one in before.items() if name != gone}
        for name, preset in RANDOM_PRESETS.items():
            if preset["architectures"] != [gone]:
                assert random_config(preset).num_layers == find_model(f"random:{name}").config.num_layers > 0
    finally:
        known_architectures.cache_clear()
