"""Models by name, as far as the time of a step depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.document import ExperimentError, nearest

ELEMENT_BYTES = 2  # bfloat16: weights, keys, values and products


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with a gated MLP and grouped-query attention."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the input embedding is also the last projection

    @property
    def layer_weights(self) -> int:
        """The matrices of all layers, elements: QKV, output, gate and up, down. Norms are left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """The last projection, elements."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        return ELEMENT_BYTES * (self.layer_weights + embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        return ELEMENT_BYTES * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(name, hidden, intermediate, layers, heads, 8, 128, 151936, tied)


_ALL = (
    # config.json of Qwen/<name> on the Hugging Face hub
    _qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
    _qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
    _qwen3("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
    _qwen3("Qwen3-8B", 4096, 12288, 36, 32, tied=False),
    _qwen3("Qwen3-14B", 5120, 17408, 40, 40, tied=False),
    _qwen3("Qwen3-32B", 5120, 25600, 64, 64, tied=False),
    # config.json of meta-llama/Llama-3.1-8B
    ModelShape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
)
SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _ALL}


def find_shape(name: str) -> ModelShape:
    """The model called `name`, or that of a Hugging Face directory; ExperimentError names the alternatives."""
    if name in SHAPES:
        return SHAPES[name]
    directory = Path(name)
    if not directory.is_dir():
        raise ExperimentError(
            [f"--model {name}: there is {', '.join(SHAPES)}, and directories with a config.json{nearest(name, SHAPES)}"]
        )
    from tmodel.config import parse_config, read_json  # loads torch

    config = parse_config(read_json(directory / "config.json"))
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return ModelShape(
        directory.resolve().name,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        kv_heads,
        head_dim,
        config.vocab_size,
        config.tie_word_embeddings,
    )
