"""What is not read, by name, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tmodel.json_files import ConfigError

_THEN = "then `tk quantize` it"
_SAVE = "from_pretrained and save_pretrained of transformers write it dense"

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "GGUF, llama.cpp's format, is not read. Take the safetensors that it was made of; or "
        f"{_SAVE} where from_pretrained is given gguf_file=, {_THEN}",
        "hqq": f"HQQ, whose zero-points are no integers, is not read. Take the dense model, {_THEN}",
        "bitsandbytes": "bitsandbytes (NF4, FP4, LLM.int8) is not read. Take the dense model that it was made of; or "
        f"{_SAVE} with dequantize() between the two, {_THEN}",
        "nvfp4": f"NVFP4, 4-bit floats with a scale for every 16, is not read. Take the dense model, {_THEN}",
        "mxfp4": "MXFP4, 4-bit floats with a power of two for every 32, is read of gpt-oss's experts alone, by its own "
        f"quant_method. Take the dense model, {_THEN}",
    }
)
"""Name, which is a `quant_method` too -> why it is refused, and what to do."""


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Checks that a `quantization_config` asks for nothing that is known not to be read.

    Raises:
        ConfigError: It does; the message names the field and says what to do.
    """
    method = raw.get("quant_method")
    if method is None and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        method = "bitsandbytes"  # as it was written before 2023's transformers named its methods
    for name, why in UNSUPPORTED.items():
        if method != "mxfp4" and str(method).lower().startswith(
            name
        ):  # transformers knows bitsandbytes_4bit and _8bit too
            raise ConfigError(f"quant_method {method!r}: {why}")
    for field, named in _formats_of(raw):
        for name in ("nvfp4", "mxfp4"):
            if name in str(named).lower():
                raise ConfigError(f"quant_method {method!r}: {field} {named!r} is not supported: {UNSUPPORTED[name]}")


def _formats_of(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that name how weights are stored, of the whole and of groups of layers, with what they say."""
    yield from ((field, raw.get(field)) for field in ("format", "quant_algo"))
    groups = raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield f"config_groups.{name}.format", group.get("format")


def refuse_gguf(path: Path) -> None:
    """Checks that `path` is neither a GGUF file nor a directory whose only weights are such files.

    Raises:
        ConfigError: It is; the message names the files and says what to do.
    """
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir())
        found = [name for name in names if name.lower().endswith(".gguf")]
        if any(name.endswith((".safetensors", ".bin")) for name in names):
            return
    else:
        found = [path.name] if path.name.lower().endswith(".gguf") else []
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"{path}: holds {', '.join(found[:3])}{more}: {UNSUPPORTED['gguf']}")
