"""A small random Qwen3 checkpoint with a byte-level BPE tokenizer, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tsched.random_model import save_random_model

TEXT = "def scan(line, start=0):\n    return [word for word in line.split(' ') if word != 'ünïcode 🐍']\n" * 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabulary 300 (0 ends a text), 2 layers of width 32, 4 query and 2 KV heads of 16 dims, 128 positions.

    The weights are wide enough that greedy tokens vary and no two logits are near.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    save_random_model(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint_without_tokenizer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(checkpoint / name)
    return directory
