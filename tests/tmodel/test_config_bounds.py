"""No value of a config.json reaches what it would break: sizes are bounded, and a file says each thing once."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.tmodel import fuzz_configs
from tests.tmodel.conftest import CONFIG, WriteCheckpoint
from tmodel import ConfigError, known_architectures, load_config


@pytest.mark.parametrize("architecture", sorted(known_architectures()))
def test_every_size_of_every_architecture_is_bounded(write_checkpoint: WriteCheckpoint, architecture: str) -> None:
    fields = known_architectures()[architecture].fields.model_fields
    sizes = [name for name, field in fields.items() if "int" in str(field.annotation)]
    assert {"vocab_size"} < set(sizes)
    for name in sizes:
        if "list[int]" in str(fields[name].annotation):
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(write_checkpoint({}, architectures=[architecture], **{name: 2**40}))
        bound = 2**12 if any(part in name for part in ("layer", "head", "expert")) else 2**24
        assert f"{name}: must be at most {bound}, got 1099511627776" in str(caught.value)
        assert "config.json: " in str(caught.value)


def test_the_largest_published_sizes_are_within_the_bounds(write_checkpoint: WriteCheckpoint) -> None:
    load_config(write_checkpoint({}, max_position_embeddings=10_485_760, vocab_size=262_208, num_hidden_layers=126))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"vocab_size": 40, "vocab_size": 41}', "cannot be read as JSON: 'vocab_size' stands twice in one object"),
        ('{"a": {"b": 1, "b": 1}}', "'b' stands twice"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 deep"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": "\\ud800"}', "cannot be read as JSON"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
    ],
)
def test_a_file_that_readers_would_read_differently(write_checkpoint: WriteCheckpoint, text: str, message: str) -> None:
    directory = write_checkpoint({})
    (directory / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(directory)


def test_a_file_without_an_end_is_not_read(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})
    with (directory / "config.json").open("r+b") as stream:
        stream.truncate(2**24 + 1)
    with pytest.raises(ConfigError, match=r"config\.json: 16777217 bytes; a model's JSON file has 16777216 at most"):
        load_config(directory)


def test_what_may_never_end_is_not_read(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})
    file = directory / "config.json"
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON: it is not a regular file"):
        load_config(directory)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON: it is not a regular file"):
        load_config(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "x" * 10**6}, "hidden_act: a text of 1000000 characters; the most are 10000"),
        ({"dtype": "x" * 10**6}, "dtype: a text of 1000000 characters"),
        ({"architectures": ["x" * 10**6]}, "architectures: a text of"),
        ({"architectures": ["x" * 5000]}, "architectures must name exactly one architecture"),
        ({"eos_token_id": [{"a": [0] * 10**5}]}, "eos_token_id"),
        ({"layer_types": ["x"] * 10**4}, "layer_types"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ],
)
def test_a_message_shows_a_value_in_short(
    write_checkpoint: WriteCheckpoint, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}") as caught:
        load_config(write_checkpoint({}, **fields))
    assert len(str(caught.value)) < 4100


@pytest.mark.parametrize("given", [True, [True], "1", {"a": 1}, [[1]], 10**30])
def test_end_tokens_of_generation_config_are_token_ids(write_checkpoint: WriteCheckpoint, given: Any) -> None:
    directory = write_checkpoint({})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(
        ConfigError,
        match=f"generation_config.json: eos_token_id .* is not a token id below vocab_size={CONFIG['vocab_size']}",
    ):
        load_config(directory)


def test_mutated_configs_are_read_or_refused_with_a_reason() -> None:
    outcomes, wrong = fuzz_configs.fuzz(80)
    assert not wrong
    assert {"refused", "read and built"} <= outcomes.keys()
