"""Mutated config.json files: each is read, or refused with a ConfigError that says why.

    python -m tests.tmodel.fuzz_configs --count 2000

What is read must have tensors and ops of sizes that can be computed with; where it is small, weights of these tensors
are drawn, and the model is built of them. A kernel that does not take its sizes says so by a SelectionError.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tmodel.conftest import CONFIG
from tests.tmodel.packed import load
from tkernels import SelectionError
from tmodel import ConfigError, Limits, WeightError, kernel_axes, known_architectures, kv_bytes_per_block, load_config

LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=16, num_blocks=32)
BASE = {
    **CONFIG, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 24, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 8,
}  # fmt: skip
"""The fields of every architecture; each leaves the others' alone."""

Config = dict[str, Any]
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 7, 16, 17, 64, 1000, 2**15, 2**24 + 1, 2**31, 2**40, 2**63, 2**64, 10**30, 10**400),
    *(-(2**70), 0.0, 0.5, 1.5, 1e-30, 1e30, 1e300, -1.0, math.nan, math.inf, -math.inf),
)
OTHERS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "silu",
        "gelu",
        "default",
        "x" * 100_000,
        "\ud800",
        "\0",
        "16",
        "auto",
        "bfloat16",
        "int4",
    ),
    *([], {}, [1], [1, 1, 2], [[1]], [None], {"a": 1}, {"": {}}, {"factor": 2.0}, ["full_attention"] * 2),
    *(["sliding_attention"] * 3, ["full_attention"] * 100_000, list(range(40)), {"x" * 5000: 1}),
)
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "short_factor"),
    *("long_factor", "truncate", "partial_rotary_factor", "full_attention"),
)
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "mrope")
FORMAT_KEYS = (
    *("quant_method", "bits", "wbits", "w_bit", "group_size", "q_group_size", "desc_act", "sym", "dynamic", "lm_head"),
    *("version", "zero_point", "checkpoint_format", "format", "modules_to_not_convert", "ignore", "config_groups"),
    *("kv_cache_scheme", "pack_dtype", "backend", "weight_block_size", "activation_scheme", "packing_format"),
)
EXPRESSIONS = (
    *("(?:(.+?)(.+?))+(?:jx|px)", "([a-z._0-9]+)+X", "(", "[[:alpha:]]", "a{e}", "((a{100}){100}){100}", "(" * 9000),
    *("lm_head", r"model\.layers\.\d+\.mlp\..*", ".*", "", "a{99999999999}", "(?P<a>.)(?P<a>.)", "\\", "(?<=.*)x"),
)
"""Over names of layers: sound ones, broken ones, and such as take for ever."""
FORMATS: tuple[Config, ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True},
    {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
    {"quant_method": "squeezellm", "wbits": 4},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8},
            },
        },
    },
)  # fmt: skip


def draw_value(rng: random.Random) -> Any:
    return rng.choice(NUMBERS if rng.random() < 0.6 else OTHERS)


def change_a_field(config: Config, rng: random.Random) -> None:
    """One that the architecture reads, or that any file has."""
    architecture = known_architectures().get(str(config["architectures"][0]))
    fields = sorted(architecture.fields.model_fields) if architecture else []
    config[rng.choice([*fields, *sorted(BASE), "rope_scaling", "rope_parameters", "torch_dtype"])] = draw_value(rng)


def drop_a_field(config: Config, rng: random.Random) -> None:
    config.pop(rng.choice(sorted(config)))


def change_the_rope(config: Config, rng: random.Random) -> None:
    rope: Config = {rng.choice(["rope_type", "type"]): rng.choice(ROPE_KINDS)}
    for key in rng.sample(ROPE_KEYS, rng.randint(0, 5)):
        value = rng.choice([draw_value(rng), rng.choice([2.0, 1.0, 4, 64, 32, 10000.0]), [1.0] * 8])
        rope[key] = value
    config[rng.choice(["rope_scaling", "rope_parameters"])] = rope
    if rng.random() < 0.5:
        config.pop("rope_theta", None)


def quantize(config: Config, rng: random.Random) -> None:
    settings: Config = json.loads(json.dumps(rng.choice(FORMATS)))
    for key in rng.sample(FORMAT_KEYS, rng.randint(0, 3)):
        settings[key] = draw_value(rng)
    if rng.random() < 0.3:
        expression = rng.choice(EXPRESSIONS)
        settings["dynamic"] = {rng.choice(["+:", "-:", ""]) + expression: {}}
        settings["ignore"] = [rng.choice(["re:", ""]) + expression]
        settings["modules_to_not_convert"] = [expression]
    if "config_groups" in settings and rng.random() < 0.5:
        group = settings["config_groups"]
        while isinstance(group, dict) and group and rng.random() < 0.7:
            key = rng.choice(sorted(group))
            if rng.random() < 0.4:
                group[key] = draw_value(rng)
            group = group[key]
    config["quantization_config"] = settings


def change_the_architecture(config: Config, rng: random.Random) -> None:
    names = ["Qwen3ForCausalLM", "LLaMAForCausalLM", "x" * 100_000, "", 3, None, {}, [[]]]
    config["architectures"] = rng.choice([[rng.choice(names)], [], "Qwen3ForCausalLM", names, None, {"0": "Qwen3"}])


CHANGES: tuple[tuple[int, Callable[[Config, random.Random], None]], ...] = (
    (8, change_a_field), (2, drop_a_field), (3, change_the_rope), (3, quantize), (1, change_the_architecture),
)  # fmt: skip


def change_text(text: bytes, rng: random.Random) -> bytes:
    """A broken file, or one that is nested, or says a thing twice."""
    place = rng.randrange(len(text))
    return rng.choice(
        [
            text[:place],
            text[:place] + rng.randbytes(1) + text[place + 1 :],
            text[:place] + rng.choice(b'{}[]:,"0 -.e').to_bytes(1, "little") + text[place:],
            text.replace(b"{", b'{"vocab_size": 40, ', 1),
            text.replace(b"{", b'{"n": ' + b"[" * 60 + b"]" * 60 + b", ", 1),
            text.replace(b"{", b'{"n": ' + b"[" * 5000, 1),
            text.replace(b"{", b'{"n": ' + b"9" * 5000 + b", ", 1),
            text.decode("utf-8", "replace").encode("utf-16"),
            b"\xef\xbb\xbf" + text,
            b"",
            b"null",
        ]
    )


def write(seed: int, directory: Path) -> str:
    """The files of a seed; returns what was changed in them."""
    rng = random.Random(seed)
    config: Config = {**BASE, "architectures": [rng.choice(sorted(known_architectures()))]}
    done = []
    for change in rng.choices(
        [one for _, one in CHANGES], [weight for weight, _ in CHANGES], k=rng.choice([1, 1, 2, 3])
    ):
        if isinstance(config.get("architectures"), list) and config["architectures"]:
            change(config, rng)
            done.append(change.__name__)
    text = json.dumps(config, ensure_ascii=True).encode()
    if rng.random() < 0.1:
        text = change_text(text, rng)
        done.append("change_text")
    (directory / "config.json").write_bytes(text)
    generation = directory / "generation_config.json"
    generation.unlink(missing_ok=True)
    if rng.random() < 0.1:
        generation.write_text(json.dumps({"eos_token_id": draw_value(rng)}))
        done.append("generation_config")
    return "+".join(done)


def read(directory: Path) -> str:
    """What comes of the files; an error of any type but those that it may have passes through."""
    try:
        config = load_config(directory)
    except ConfigError as error:
        if str(directory) not in str(error) or len(str(error)) > 20_000:
            raise AssertionError(f"a message without a file, or without an end: {str(error)[:200]}") from error
        return "refused"
    shapes = config.tensors()
    kernel_axes(config, LIMITS)
    kv_bytes_per_block(config, LIMITS.block_size, config.dtype)
    if sum(map(math.prod, shapes.values())) > 100_000 or config.max_position_embeddings > 2**15:
        return "read"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(directory, torch.float32, max_model_len=LIMITS.max_model_len)
    except (WeightError, SelectionError) as error:
        return f"read, and then {type(error).__name__}"
    return "read and built"


def fuzz(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How many files came to what, and what is wrong."""
    outcomes: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for one in range(seed, seed + count):
            how = write(one, Path(folder))
            try:
                outcomes[read(Path(folder))] += 1
            except Exception as error:
                wrong.append(f"seed {one} ({how}): {type(error).__name__}: {str(error)[:300]}")
    return outcomes, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first file; the next one's is one more")
    arguments = parser.parse_args()
    outcomes, wrong = fuzz(arguments.count, arguments.seed)
    print(f"{arguments.count:,} mutated config.json: {len(wrong)} raised something else than the typed error")
    for outcome, times in outcomes.most_common():
        print(f"{times:>8,}  {outcome}")
    print("\n".join(wrong[:20]))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
