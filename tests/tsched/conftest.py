"""A small random Qwen3 checkpoint with a byte-level BPE tokenizer, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tkernels  # noqa: F401  before transformers: it decides whether Triton interprets

TEXT = "def scan(line, start=0):\n    return [word for word in line.split(' ') if word != 'ünïcode 🐍']\n" * 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabulary 300 (0 ends a text), 2 layers of width 32, 4 query and 2 KV heads of 16 dims, 128 positions.

    The weights are wide enough that greedy tokens vary and no two logits are near.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint_without_tokenizer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(checkpoint / name)
    return directory
