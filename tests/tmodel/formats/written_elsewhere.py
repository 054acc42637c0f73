"""Checkpoints that other tools pack themselves, each in an environment of its own: are they read bit for bit?

python -m tests.tmodel.formats.written_elsewhere MODEL FOLDER [--only NAME ...] [--squeezellm CHECKOUT]

MODEL is a small dense model with a tokenizer: a directory, or the preset tiny. FOLDER keeps the tools' environments
(pip installs them, and an index must be in reach) and what they packed: what is there is not made again. A tool that
does not install here is said not to be made, which is no success. CHECKOUT is of github.com/SqueezeAILab/SqueezeLLM. Of
every checkpoint each layer is read and compared with what the tool itself decodes, and `tk generate` is run on it. The
command prints a row for each kind, and what is wrong with it; it fails where something is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.environments import INSTALLED, make_environment, run_command
from tests.tmodel.formats.tools.decoded import CHECKPOINT, DECODED
from tkernels.quantized import scaled_weight
from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel import find_model, load_config
from tmodel.weights import Checkpoint

PACKERS = Path(__file__).parent / "tools"
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "gptqmodel": ("gptqmodel",),
    "autoawq": ("autoawq==0.2.7", "transformers<4.48", "torch==2.13.*"),
    "auto_round": ("auto-round",),
    "llm_compressor": ("llmcompressor",),
    "squeezellm": (),
}
"""Packer -> what its environment needs, the tool first; where nothing, this project's own environment is enough."""

OTHER_MODELS: Mapping[str, str] = {"autoawq": "tiny-qwen2"}
"""Packer -> the model that it packs in place of MODEL: the tool, of 2024, knows no Qwen3. This one's head is tied."""

GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@dataclass(frozen=True)
class Made:
    """A kind of checkpoint: a tool's packer and what it is told."""

    name: str
    packer: str
    options: Mapping[str, Any]


KINDS = (
    Made("gptqmodel-4bit-sym", "gptqmodel", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    Made("gptqmodel-4bit-v2-act-order", "gptqmodel",
         {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "format": "gptq_v2"}),
    *(Made(f"gptqmodel-{bits}bit", "gptqmodel", {"bits": bits, "group_size": 32, "sym": False, "desc_act": False})
      for bits in (2, 3, 8)),
    Made("gptqmodel-dynamic", "gptqmodel",
         {"bits": 4, "group_size": 32, "dynamic": {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8}}}),
    Made("gptqmodel-awq", "gptqmodel", {"bits": 4, "group_size": 32, "quant_method": "awq", "format": "gemm"}),
    Made("autoawq", "autoawq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    Made("auto-round", "auto_round", {"bits": 4, "group_size": 32, "sym": True, "format": "auto_round"}),
    Made("auto-round-asymmetric", "auto_round", {"bits": 4, "group_size": 32, "sym": False, "format": "auto_round"}),
    Made("auto-round-gptqmodel", "auto_round",
         {"bits": 4, "group_size": 32, "sym": False, "format": "auto_round:gptqmodel"}),
    Made("auto-round-awq", "auto_round", {"bits": 4, "group_size": 32, "sym": False, "format": "auto_round:auto_awq"}),
    Made("auto-round-fp8", "auto_round", {"scheme": "FP8_BLOCK", "format": "auto_round"}),
    Made("llm-compressor-w4a16", "llm_compressor", {"weights": {**GROUPS, "symmetric": True}}),
    Made("llm-compressor-w4a16-asymmetric", "llm_compressor", {"weights": {**GROUPS, "symmetric": False}}),
    Made("llm-compressor-w8a8", "llm_compressor",
         {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
          "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}),
    Made("llm-compressor-fp8", "llm_compressor",
         {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
          "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}),
    Made("llm-compressor-fp8-static", "llm_compressor",
         {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
          "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}),
    Made("llm-compressor-fp8-block", "llm_compressor",
         {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
          "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
                                "dynamic": True}}),
    Made("llm-compressor-fp8-cache", "llm_compressor",
         {"weights": {**GROUPS, "symmetric": True},
          "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}),
    *(Made(f"squeezellm-{bits}bit{'-sparse' if sparse else ''}", "squeezellm", {"wbits": bits, "sparse": sparse})
      for bits in (3, 4) for sparse in (0, 0.005)),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a kind.

    Attributes:
        compared: Weights that were compared.
        is_equal: Whether all of them are what the tool decodes, bit for bit.
        generates: Whether `tk generate` ran on the checkpoint.
        problems: What is wrong; none where both are so.
    """

    compared: int = 0
    is_equal: bool = False
    generates: bool = False
    problems: tuple[str, ...] = ()


def find_differences(checkpoint: Path, decoded: Path) -> tuple[int, list[str]]:
    """Compares each layer as it is read with what the tool decodes of it, in the dtype that the tool decodes in.

    A product of a code and a scale is exact in float64, so that rounding it once gives the tool's own result.

    Returns:
        (weights that were compared, what differs: a layer that only one of the two has, or unequal weights).
    """
    config = load_config(checkpoint)
    quantization = config.quantization
    if quantization is None:
        return 0, [f"{checkpoint}: is read as a dense model"]
    sizes = {
        n: (rows, part.inputs) for part in config.linears() for n, rows in zip(part.names, part.outputs, strict=True)
    }
    compared, problems = 0, []
    with (
        Checkpoint(checkpoint, device="cpu", dtype=torch.float32) as stored,
        safe_open(decoded, framework="pt") as theirs,
    ):
        decoded_layers = set(theirs.keys())
        problems += [f"{name}: there is no such layer" for name in sorted(decoded_layers - sizes.keys())]
        for name, (outputs, inputs) in sizes.items():
            is_quantized = quantization.scheme(name) is not None
            if is_quantized != (name in decoded_layers):
                problems.append(f"{name}: is read as {'quantized' if is_quantized else 'dense'}, which the tool denies")
            elif is_quantized:
                expected = theirs.get_tensor(name)
                read = quantization.format.read(stored, name, outputs, inputs)
                decode = dequantize if isinstance(read, QuantizedWeight) else scaled_weight.dequantize
                weight = decode(read, torch.float64)
                unequal = weight.to(expected.dtype) != expected
                compared += expected.numel()
                if bool(unequal.any()):
                    place = tuple(unequal.nonzero()[0].tolist())
                    problems.append(
                        f"{name}: {int(unequal.sum())} of {unequal.numel()} weights differ, the first at {place}: "
                        f"{float(weight[place])} is read, {float(expected[place])} is the tool's"
                    )
    return compared, problems


def find_environment(folder: Path, packer: str) -> Path | None:
    """The interpreter of a packer's environment, made where it is not there; None where it does not install here."""
    if not REQUIREMENTS[packer]:
        return Path(sys.executable)
    return make_environment(folder / packer, REQUIREMENTS[packer])


def name_version(folder: Path, packer: str, checkout: Path | None) -> str:
    """The tool with its version, as pip installed it or as its checkout says."""
    if not REQUIREMENTS[packer]:
        return f"SqueezeLLM {run_command(['git', '-C', checkout, 'rev-parse', '--short', 'HEAD']).stdout.strip()}"
    tool = re.split("[=<>]", REQUIREMENTS[packer][0])[0]
    installed = (folder / packer / INSTALLED).read_text()
    return " ".join(re.findall(rf"^({tool})==(.+)$", installed, re.MULTILINE | re.IGNORECASE)[0])


def check_kind(kind: Made, python: Path, model: Path, out: Path, options: Mapping[str, Any]) -> Outcome:
    """Packs a kind where it is not there, compares how it is read, and generates."""
    if not (out / DECODED).exists():
        done = run_packer(kind.packer, python, model, out, {**kind.options, **options})
        if done.returncode:
            return Outcome(problems=(f"its tool failed:\n{done.stderr.strip()[-2000:]}",))
    checkpoint = out / CHECKPOINT
    if kind.packer == "squeezellm":
        checkpoint = out / "converted"
        done = None if checkpoint.exists() else _run_tk("convert", out / CHECKPOINT, checkpoint)
        if done is not None and done.returncode:
            return Outcome(problems=(done.stderr.strip(),))
    try:
        compared, problems = find_differences(checkpoint, out / DECODED)
    except ValueError as error:
        return Outcome(problems=(str(error),))
    done = _run_tk("generate", "--model", checkpoint, "--prompt", "def main(", "--max-tokens", 4, "--ignore-eos")
    words = [f"tk generate: {done.stderr.strip()[-2000:]}"] if done.returncode else []
    return Outcome(compared, bool(compared) and not problems, not done.returncode, (*problems, *words))


def run_packer(
    packer: str, python: Path, model: Path, out: Path, options: Mapping[str, Any]
) -> subprocess.CompletedProcess[str]:
    """Runs a packer in a folder of its own beside `out`: some tools write logs where they are."""
    logs = out.with_name(f"{out.name}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    told = json.dumps(dict(options))
    command = [python.absolute(), PACKERS / f"pack_{packer}.py", model.resolve(), out.resolve(), told]
    return run_command(command, cwd=logs)


def _run_tk(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "experiments.cli", *arguments])


def main() -> int:
    """1 where a kind is read wrong or was not made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--squeezellm", type=Path, metavar="CHECKOUT")
    asked = parser.parse_args()
    environments, bad = asked.folder / "environments", []
    print("| kind | tool | weights | bit-equal | tk generate |\n|---|---|---|---|---|", flush=True)
    for kind in (kind for kind in KINDS if not asked.only or kind.name in asked.only):
        missing = kind.packer == "squeezellm" and asked.squeezellm is None
        options = {"checkout": str(asked.squeezellm.resolve())} if kind.packer == "squeezellm" and not missing else {}
        python = None if missing else find_environment(environments, kind.packer)
        if python is None:
            outcome, tool = Outcome(problems=("not made: its tool is not here",)), kind.packer
        else:
            model = find_model(OTHER_MODELS.get(kind.packer, asked.model)).directory().resolve()
            outcome = check_kind(kind, python, model, asked.folder / kind.name, options)
            tool = name_version(environments, kind.packer, asked.squeezellm)
        equal, generates = ("yes" if is_so else "NO" for is_so in (outcome.is_equal, outcome.generates))
        print(f"| {kind.name} | {tool} | {outcome.compared:,} | {equal} | {generates} |", flush=True)
        bad += [f"{kind.name}: {problem}" for problem in outcome.problems]
    print("\n".join(["", *bad]) if bad else "\nevery kind is read bit for bit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
