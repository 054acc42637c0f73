"""Checkpoints: each float dtype and layout loads, and a damaged one is refused by file and tensor."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel import fuzz_headers
from tests.tmodel.conftest import CONFIG, WriteCheckpoint, checkpoint_tensors
from tmodel.weights import Checkpoint, WeightError

Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")


def opened(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(directory, device="cpu", dtype=dtype)


def write_sharded(directory: Path) -> dict[str, torch.Tensor]:
    """Two shards and their index in place of the single file; returns the tensors."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    return tensors


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_fused_in_order_and_cast(
    write_checkpoint: WriteCheckpoint, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in checkpoint_tensors(CONFIG).items()}
    with opened(write_checkpoint(tensors), wanted) as checkpoint:
        qkv = checkpoint.fused([Q, K, V], [(64, 16), (32, 16), (32, 16)])
    assert qkv.dtype == wanted
    assert torch.equal(qkv, torch.cat([tensors[name].to(wanted) for name in (Q, K, V)]))


def test_weights_do_not_share_the_file(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    with opened(directory) as checkpoint:
        weight = checkpoint.tensor(Q, (64, 16))
    before = weight.clone()
    file = directory / "model.safetensors"
    with file.open("r+b") as stream:  # in place: a mapping of the file would show it
        stream.seek(-2000, 2)
        stream.write(bytes(2000))
    assert torch.equal(weight, before)


def test_sharded_is_the_same_as_single(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    tensors = write_sharded(directory)
    with opened(directory) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.tensor(name, tensor.shape), tensor)
        checkpoint.refuse_unused()


def test_a_missing_tensor_is_named(write_checkpoint: WriteCheckpoint) -> None:
    tensors = checkpoint_tensors(CONFIG)
    del tensors[K]
    checkpoint = opened(write_checkpoint(tensors))
    with pytest.raises(WeightError, match=rf"tensor '{K}' is missing from model\.safetensors"):
        checkpoint.fused([Q, K, V], [(64, 16), (32, 16), (32, 16)])


def test_a_wrong_shape_is_named(write_checkpoint: WriteCheckpoint) -> None:
    tensors = checkpoint_tensors(CONFIG)
    tensors[K] = tensors[K][:16].contiguous()
    checkpoint = opened(write_checkpoint(tensors))
    with pytest.raises(WeightError, match=rf"model\.safetensors: tensor '{K}' has shape \[16, 16\].*\[32, 16\]"):
        checkpoint.tensor(K, (32, 16))


def test_an_unexpected_tensor_is_named(write_checkpoint: WriteCheckpoint) -> None:
    checkpoint = opened(write_checkpoint({"model.norm.weight": torch.ones(16), "extra.weight": torch.ones(2)}))
    checkpoint.tensor("model.norm.weight", (16,))
    with pytest.raises(WeightError, match=r"model\.safetensors: unexpected tensor 'extra\.weight'"):
        checkpoint.refuse_unused()


def test_every_truncation_is_refused_before_anything_is_read(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = struct.unpack("<Q", whole[:8])[0]
    for length in (0, 5, 8, 8 + header_bytes // 2, 8 + header_bytes, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        tensor = " tensor '" if length >= 8 + header_bytes else ""
        with pytest.raises(WeightError, match=rf"model\.safetensors: truncated.*{tensor}"):
            opened(directory)


def test_damaged_headers_are_refused(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    file = directory / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header, message in [
        (b"{" * 40, "its header cannot be read"),
        (b"[1, 2]", "not a JSON object"),
        ({"w": 3}, "tensor 'w' has a damaged header entry"),
        ({"w": {**entry, "dtype": "C64"}}, "tensor 'w' is stored as C64; supported are F64, F32, F16, BF16"),
        ({"w": {**entry, "shape": [3]}}, r"tensor 'w' spans 8 bytes, its shape \[3\]"),
        ({"w": {**entry, "data_offsets": [-8, 0]}}, "tensor 'w' has a damaged header entry"),
        (b"[" * 100_000, "its header cannot be read"),
    ]:
        encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(8))
        with pytest.raises(WeightError, match=rf"model\.safetensors: .*{message}"):
            opened(directory)


def test_no_value_in_a_header_escapes_the_checks(write_checkpoint: WriteCheckpoint) -> None:
    """Every field of an entry, and every number in it, replaced by each of a list of JSON values."""
    directory = write_checkpoint()
    file = directory / "model.safetensors"
    odd = ("null", "true", "1.5", "NaN", "Infinity", "-1", "9" * 4000, '"0"', '"F32"', '["F32"]', "[]", "{}", "[[2]]")
    entries = [
        template.replace("?", value)
        for template in (
            "?",
            '{"dtype": ?, "shape": [2], "data_offsets": [0, 8]}',
            '{"dtype": "F32", "shape": ?, "data_offsets": [0, 8]}',
            '{"dtype": "F32", "shape": [?], "data_offsets": [0, 8]}',
            '{"dtype": "F32", "shape": [2, ?], "data_offsets": [0, 8]}',
            '{"dtype": "F32", "shape": [2], "data_offsets": ?}',
            '{"dtype": "F32", "shape": [2], "data_offsets": [?, 8]}',
            '{"dtype": "F32", "shape": [2], "data_offsets": [0, ?]}',
            '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8, ?]}',
        )
        for value in odd
    ]
    entries.remove('{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}')  # the one that is whole
    for entry in entries:
        encoded = f'{{"w": {entry}}}'.encode()
        file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(8))
        with pytest.raises(WeightError, match=r"model\.safetensors: .*tensor 'w' "):
            opened(directory)


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        # The whole data is read, and `b` is some of `a`'s bytes.
        ({"a": (0, 8), "b": (4, 8)}, 8, "tensor 'b' begins at byte 4 of the data, where byte 8 is expected"),
        ({"a": (4, 12)}, 12, "tensor 'a' begins at byte 4 of the data, where byte 0 is expected"),
        ({"a": (0, 4), "b": (8, 12)}, 12, "tensor 'b' begins at byte 8 of the data, where byte 4 is expected"),
        ({"a": (0, 8)}, 12, "4 bytes follow its last tensor"),
        ({}, 1, "1 bytes follow its last tensor"),
        ({"a": (0, 8)}, 7, "truncated: tensor 'a' ends at byte 8 of the data, the file holds 7"),
    ],
)
def test_tensors_share_the_data_out(
    tmp_path: Path, header: dict[str, tuple[int, int]], data_bytes: int, message: str
) -> None:
    entries = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in header.items()
    }
    encoded = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes))
    with pytest.raises(WeightError, match=rf"model\.safetensors: {message}"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"w": ENTRY, "w": ENTRY}', "its header cannot be read: 'w' stands twice in one object"),
        (b'{"w": {"dtype": "F32", "shape": [3], "shape": [2], "data_offsets": [0, 8]}}', "'shape' stands twice"),
        (b'{"w": {"dtype": "F32", "shape": [-0, 2], "data_offsets": [-0, 8]}}', "whole numbers"),
        (b'{"w": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}}', "whole numbers"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}}', "must be an object of"),
        (
            b'{"w": {"dtype": "F32", "shape": [4294967296, 4294967296, 0], "data_offsets": [0, 0]}}',
            "more than 92233720",
        ),
        (b'{"w": {"dtype": "F32", "shape": [9223372036854775808, 0], "data_offsets": [0, 0]}}', "whole numbers"),
        (b'{"\\ud800": ENTRY}', "its header cannot be read"),
        (b'\xef\xbb\xbf{"w": ENTRY}', "its header cannot be read"),
        ('{"w": ENTRY}'.encode("utf-16-le"), "its header cannot be read"),
        (b'{"w": ENTRY, "__metadata__": {"a": 1}}', "__metadata__ of its header must map names to texts"),
        (b'{"w": ENTRY, "__metadata__": []}', "__metadata__ of its header must map names to texts"),
    ],
)
def test_a_header_says_one_thing_alone(tmp_path: Path, header: bytes, message: str) -> None:
    encoded = header.replace(b"ENTRY", b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}')
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(8))
    with pytest.raises(WeightError, match=rf"model\.safetensors: .*{message}"):
        opened(tmp_path)


def test_a_header_over_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(100_000_200)  # a hole: no byte of it is on disk
    with pytest.raises(WeightError, match="its header has 100000001 bytes; the most are 100000000"):
        opened(tmp_path)


def test_mutated_headers_load_only_where_the_reference_library_loads_them() -> None:
    outcomes, wrong = fuzz_headers.fuzz(400)
    assert not wrong
    assert {"both load", "both refuse"} <= outcomes.keys()


def test_a_missing_shard_is_named_with_a_tensor(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    write_sharded(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-00002\.safetensors: no such file.*tensor 'model\.layers"):
        opened(directory)


def test_an_index_that_promises_too_much_is_refused(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint()
    write_sharded(directory)
    index_file = directory / "model.safetensors.index.json"
    weight_map = json.loads(index_file.read_text())["weight_map"]
    index_file.write_text(json.dumps({"weight_map": {**weight_map, "ghost": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightError, match=r"model-00001-of-00002\.safetensors: tensor 'ghost' is missing"):
        opened(directory)
    for elsewhere in ("../model.safetensors", "/etc/model.safetensors", "model.bin", 3, None, ["a"]):
        index_file.write_text(json.dumps({"weight_map": {"w": elsewhere}}))
        with pytest.raises(
            WeightError,
            match=rf"index\.json: weight_map says that tensor 'w' is in {re.escape(repr(elsewhere))}, not a",
        ):
            opened(directory)
    for damaged, message in (
        ("{", "cannot be read as JSON: "),
        ('{"weight_map": {}, "weight_map": {}}', "cannot be read as JSON: 'weight_map' stands twice"),
        ('{"weight_map": 3}', "weight_map must say of each tensor which safetensors file it is in, got 3"),
        ("[]", "weight_map must say of each tensor which safetensors file it is in, got None"),
        ('{"weight_map": {}}', r"weight_map must say .*, got {}"),
    ):
        index_file.write_text(damaged)
        with pytest.raises(WeightError, match=rf"index\.json: {message}"):
            opened(directory)
    with index_file.open("r+b") as stream:
        stream.truncate(2**40)  # a hole, which takes no room on the disk
    with pytest.raises(WeightError, match=r"index\.json: 1099511627776 bytes; an index has 100000000 at most"):
        opened(directory)


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin, a Python pickle.*can run any code"):
        opened(tmp_path)


def test_a_directory_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"no weights here; expected model\.safetensors"):
        opened(tmp_path)
    with pytest.raises(WeightError, match="no such directory"):
        opened(tmp_path / "nowhere")
    save_file({"w": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightError, match=r"model-00001-of-00002\.safetensors but neither"):
        opened(tmp_path)


def test_values_beyond_float16_are_refused(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({"w": torch.tensor([1.0, 7e4])})
    with pytest.raises(WeightError, match="tensor 'w' has values beyond float16's range"):
        opened(directory, torch.float16).tensor("w", (2,))


def test_a_tied_head_must_be_the_embedding(write_checkpoint: WriteCheckpoint) -> None:
    embedding = torch.randn(4, 2)
    checkpoint = opened(write_checkpoint({"lm_head.weight": embedding + 1}))
    with pytest.raises(WeightError, match=r"'lm_head\.weight' differs from the embedding"):
        checkpoint.require_equal("lm_head.weight", embedding)
    opened(write_checkpoint({"lm_head.weight": embedding})).require_equal("lm_head.weight", embedding)
    opened(write_checkpoint({"model.norm.weight": torch.ones(1)})).require_equal("lm_head.weight", embedding)


def test_a_raw_tensor_keeps_its_dtype_and_is_taken(write_checkpoint: WriteCheckpoint) -> None:
    stored = {
        "long": torch.tensor([2**40, -1]),
        "words": torch.tensor([[-(2**31), 2**31 - 1]], dtype=torch.int32),
        "bytes": torch.tensor([-128, 127], dtype=torch.int8),
        "codes": torch.tensor([0, 255], dtype=torch.uint8),
        "eighth": torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn),
        "half": torch.tensor([torch.inf, 1.0], dtype=torch.float16),
        "none": torch.empty(0, 3, dtype=torch.int32),
    }
    checkpoint = opened(write_checkpoint(stored), torch.float16)
    for name, tensor in stored.items():
        raw = checkpoint.raw(name, tensor.shape, {tensor.dtype})
        assert raw.dtype == tensor.dtype
        assert torch.equal(raw.view(torch.uint8), tensor.view(torch.uint8))
        assert checkpoint.shape(name) == tensor.shape
    checkpoint.refuse_unused()


def test_a_raw_tensor_of_another_kind_is_named_with_the_rule(write_checkpoint: WriteCheckpoint) -> None:
    checkpoint = opened(write_checkpoint({"w": torch.ones(2, 3, dtype=torch.int32)}))
    with pytest.raises(WeightError, match=r"model\.safetensors: tensor 'w' is stored as I32; supported are U8, I8"):
        checkpoint.raw("w", (2, 3), (torch.uint8, torch.int8))
    with pytest.raises(WeightError, match=r"tensor 'w' has shape \[2, 3\], where \[N, K\] = \[3, 2\] is expected"):
        checkpoint.raw("w", (3, 2), (torch.int32,), "where [N, K] = {} is expected")
    with pytest.raises(WeightError, match=r"tensor 'w' is stored as I32; supported are F64, F32, F16, BF16"):
        checkpoint.tensor("w", (2, 3))
    with pytest.raises(WeightError, match="tensor 'v' is missing from model.safetensors"):
        checkpoint.raw("v", (2, 3), (torch.int32,))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_tensor_larger_than_the_buffer_is_read_in_parts(
    write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype
) -> None:
    monkeypatch.setattr("tmodel.weights.BUFFER_BYTES", 64)
    stored = {"a": torch.randn(7, 5), "b": torch.randn(3, 5)}
    fused = opened(write_checkpoint(stored), wanted).fused(["a", "b"], [(7, 5), (3, 5)])
    assert torch.equal(fused, torch.cat((stored["a"], stored["b"])).to(wanted))


def test_a_file_that_becomes_shorter_after_its_header_was_read(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({"w": torch.ones(100)})
    checkpoint = opened(directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightError, match=r"tensor 'w' cannot be read: the file has become shorter"):
        checkpoint.tensor("w", (100,))


def test_weights_that_may_never_end_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.safetensors: its header cannot be read: it is not a regular file"):
        opened(tmp_path)


def test_a_message_shows_a_name_in_short(write_checkpoint: WriteCheckpoint) -> None:
    with (
        opened(write_checkpoint({"x" * 10**6: torch.ones(1)})) as checkpoint,
        pytest.raises(WeightError, match="unexpected tensor 'xxx") as caught,
    ):
        checkpoint.refuse_unused()
    assert len(str(caught.value)) < 4100


def test_a_tensor_that_no_memory_holds_is_named(
    write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with opened(write_checkpoint({"w": torch.ones(4, 8)})) as checkpoint, monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(WeightError, match="tensor 'w' takes 128 bytes of memory, which cpu has not"):
            checkpoint.tensor("w", (4, 8))
