"""Mutated safetensors headers, read here and by the format's reference library.

    python -m tests.tmodel.fuzz_headers --count 5000

Nothing may load that the reference refuses, and what both load must be the same tensors. What is refused here alone
must be so for one of the reasons in ALONE, which are no rule of the reference's and meant.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize

from tmodel.safetensors_header import DTYPES
from tmodel.weights import Checkpoint, WeightError

ALONE = {
    "is stored as": "a dtype that no model here has",
    "stands twice in one object": "a name that stands twice: the format forbids it, the reference takes the last",
    "must be an object of": "an entry with more or fewer fields, or in another form: no text of the format has it",
    "whole numbers from 0 to": "a dtype in another form, or a size of 2^63 or more",
    "more than 9223372036854775807 elements": "more elements than torch counts, times 0",
}
"""Part of the message -> what is refused here although the reference loads it."""

Header = dict[str, Any]
NUMBERS = (-1, 0, 1, 2, 3, 4, 8, 12, 16, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
NAMES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "U16", "C64", "F4", "f32")
VALUES = (None, True, 1.0, -1, "0", "F32", [], {}, [[2]], [1, 2], {"F32": None}, ["F32", [2], [0, 8]])
TEXTS = ("-0", "1e0", "1.0", "+1", "01", "0x1", "NaN", "Infinity", "1e999", "null", "9" * 400, "9" * 5000, '"1"')


def draw_file(rng: random.Random) -> tuple[Header, bytes]:
    """A sound header and its data: up to six tensors, in an order of their own."""
    header: Header = {}
    place = 0
    for index in range(rng.randint(0, 6)):
        dtype = rng.choice(["F32", "F16", "BF16", "I64", "I32", "U8", "F64"])
        shape = [rng.choice([0, 1, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
        num_bytes = DTYPES[dtype].itemsize * math.prod(shape)
        header[f"layer.{index}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + num_bytes]}
        place += num_bytes
    names = list(header)
    rng.shuffle(names)
    shuffled = {name: header[name] for name in names}
    if rng.random() < 0.3:
        shuffled = {"__metadata__": {"format": "pt"}, **shuffled}
    return shuffled, rng.randbytes(place)


def entries(header: Header) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def change_offset(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        offsets = header[rng.choice(names)]["data_offsets"]
        offsets[rng.randrange(2)] = rng.choice([rng.choice(NUMBERS), max(offsets) + rng.randint(-8, 8)])


def shift_a_tensor(header: Header, rng: random.Random) -> None:
    """Its bytes are another's, or there is a gap: the sizes still fit."""
    if names := entries(header):
        offsets, by = header[rng.choice(names)]["data_offsets"], rng.choice([-8, -4, -2, -1, 1, 2, 4, 8])
        offsets[:] = [max(0, place + by) for place in offsets]


def share_bytes(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        header[rng.choice(names)]["data_offsets"] = list(header[rng.choice(names)]["data_offsets"])


def swap_tensors(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        one, other = header[rng.choice(names)], header[rng.choice(names)]
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def drop_a_tensor(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        del header[rng.choice(names)]


def add_a_tensor(header: Header, rng: random.Random) -> None:
    last = max((header[name]["data_offsets"][1] for name in entries(header)), default=0)
    start = rng.choice([0, last, last + 4])
    header["added"] = {"dtype": "F32", "shape": [0], "data_offsets": [start, start]}


def change_shape(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        shape = header[rng.choice(names)]["shape"]
        shape.insert(rng.randint(0, len(shape)), rng.choice(NUMBERS))
        if rng.random() < 0.5:
            shape.insert(rng.randint(0, len(shape)), rng.choice([0, 2**32, 2**62]))


def change_dtype(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        header[rng.choice(names)]["dtype"] = rng.choice(NAMES)


def change_a_value(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        name, value = rng.choice(names), json.loads(json.dumps(rng.choice(VALUES)))
        if rng.random() < 0.3:
            header[name] = value
        else:
            header[name][rng.choice(["dtype", "shape", "data_offsets"])] = value


def change_fields(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        entry = header[rng.choice(names)]
        if rng.random() < 0.5:
            del entry[rng.choice(["dtype", "shape", "data_offsets"])]
        else:
            entry["more"] = rng.choice(VALUES)


def change_metadata(header: Header, rng: random.Random) -> None:
    header["__metadata__"] = rng.choice([None, {}, {"a": "b"}, {"a": 1}, {"a": None}, {"a": {}}, [], "pt", 3, True])


def rename(header: Header, rng: random.Random) -> None:
    if names := entries(header):
        header[rng.choice(["", "\ud800", "\u00e9", "a\0b", '"', "\\", "__metadata", "x" * 300])] = header.pop(names[0])


CHANGES: tuple[Callable[[Header, random.Random], None], ...] = (
    change_offset, shift_a_tensor, share_bytes, swap_tensors, drop_a_tensor, add_a_tensor, change_shape, change_dtype,
    change_a_value, change_fields, change_metadata, rename,
)  # fmt: skip
"""Of the header as it is meant."""


def write_twice(text: bytes, rng: random.Random) -> bytes:
    """A tensor, or a field of it, stands twice."""
    if rng.random() < 0.5:
        return text.replace(b'"dtype"', b'"shape": [2], "dtype"', 1)
    return text.replace(b"{", b'{"layer.0.weight": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, ', 1)


def write_a_number_otherwise(text: bytes, rng: random.Random) -> bytes:
    places = [place for place in range(len(text)) if text[place : place + 1].isdigit() and text[place - 1] in b" ["]
    if not places:
        return text
    place = rng.choice(places)
    end = place
    while text[end : end + 1].isdigit():
        end += 1
    return text[:place] + rng.choice(TEXTS).encode() + text[end:]


def change_bytes(text: bytes, rng: random.Random) -> bytes:
    place, some = rng.randint(0, len(text)), rng.randbytes(rng.randint(1, 2))
    return rng.choice([text[:place] + text[place + 1 :], text[:place] + some + text[place + len(some) :], text[:place]])


def change_a_character(text: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(max(1, len(text)))
    return text[:place] + rng.choice(list('{}[]:,"\\0123456789-. \nFIB')).encode() + text[place + 1 :]


def pad(text: bytes, rng: random.Random) -> bytes:
    space = rng.choice([b" ", b"\n", b"\t", b"\0", b"\xef\xbb\xbf", b"\x0b", b"#"]) * rng.randint(1, 3)
    return space + text if rng.random() < 0.5 else text + space


def encode_otherwise(text: bytes, rng: random.Random) -> bytes:
    return text.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-16-le", "utf-8-sig"]))


def nest(text: bytes, rng: random.Random) -> bytes:
    deep = rng.choice([100, 127, 128, 200, 3000])
    return text.replace(b'"shape": [', b'"shape": [' + b"[" * deep + b"]" * deep, 1)


WRITINGS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    write_twice, write_a_number_otherwise, change_bytes, change_a_character, pad, encode_otherwise, nest,
)  # fmt: skip
"""Of its bytes."""


def cut(file: bytes, rng: random.Random) -> bytes:
    return file[: rng.choice([rng.randint(0, len(file)), max(0, len(file) - rng.randint(1, 4))])]


def append(file: bytes, rng: random.Random) -> bytes:
    return file + bytes(rng.randint(1, 9))


def change_length(file: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<Q", file[:8])[0]
    near = max(0, length + rng.choice([-8, -1, 1, 8]))
    return struct.pack("<Q", rng.choice([near, 0, 1, 2**32, 100_000_001, 2**63, 2**64 - 1, 2**64 - 8])) + file[8:]


FILES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, append, change_length)


def mutate(seed: int) -> tuple[bytes, str]:
    """A file that is broken in one to three ways, or in ways that undo each other, and their names."""
    rng = random.Random(seed)
    header, data = draw_file(rng)
    done = []
    kinds = rng.choices(("header", "text", "file"), (6, 3, 1), k=rng.choice([1, 1, 1, 2, 3]))
    for _ in range(kinds.count("header")):
        change = rng.choice(CHANGES)
        try:
            change(header, rng)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):
            continue  # what it would change, an earlier one has broken
        done.append(change.__name__)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    for _ in range(kinds.count("text")):
        writing = rng.choice(WRITINGS)
        text = writing(text, rng)
        done.append(writing.__name__)
    file = struct.pack("<Q", len(text)) + text + data
    for _ in range(kinds.count("file")):
        of_file = rng.choice(FILES)
        file = of_file(file, rng) if len(file) >= 8 else file
        done.append(of_file.__name__)
    return file, "+".join(done)


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> dtype, shape, bytes."""


def read_by_the_reference(file: bytes) -> Tensors | None:
    """None where it refuses."""
    try:
        found = deserialize(file)
    except SafetensorError:
        return None
    return {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in found}


def read_here(directory: Path, file: bytes) -> Tensors | str:
    """The words of the refusal where it is one."""
    (directory / "model.safetensors").write_bytes(file)
    named = {dtype: name for name, dtype in DTYPES.items()}
    try:
        with Checkpoint(directory, device="cpu", dtype=torch.float32) as checkpoint:
            tensors = {name: checkpoint.peek(name) for name in checkpoint.names}
    except WeightError as error:
        return str(error)
    return {
        name: (named[tensor.dtype], tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def compare(seed: int, directory: Path) -> tuple[str, str | None]:
    """What came of the file of a seed, and what is wrong about that (None where nothing is)."""
    file, how = mutate(seed)
    expected, found = read_by_the_reference(file), read_here(directory, file)
    if expected is None:
        if isinstance(found, str):
            return "both refuse", None
        return "only here loaded", f"seed {seed} ({how}): the reference refuses it, and it loads"
    if isinstance(found, str):
        meant = [kind for words, kind in ALONE.items() if words in found]
        if meant:
            return f"only here refused: {meant[0]}", None
        return "only here refused", f"seed {seed} ({how}): the reference loads it; {found}"
    if found != expected:
        return "loaded otherwise", f"seed {seed} ({how}): the tensors are others than the reference's"
    return "both load", None


def fuzz(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How many files came to what, and what is wrong."""
    outcomes: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for one in range(seed, seed + count):
            outcome, fault = compare(one, Path(folder))
            outcomes[outcome] += 1
            wrong += [fault] if fault else []
    return outcomes, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first file; the next one's is one more")
    arguments = parser.parse_args()
    outcomes, wrong = fuzz(arguments.count, arguments.seed)
    print(f"{arguments.count:,} mutated headers beside the reference library: {len(wrong)} faults")
    for outcome, times in outcomes.most_common():
        print(f"{times:>8,}  {outcome}")
    print("\n".join(wrong[:20]))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
