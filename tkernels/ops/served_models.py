"""The linear layers of the models that the project is judged on: where dense products are timed and tuned."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tkernels.ops.products import ROW_CLASSES


@dataclass(frozen=True)
class ServedModel:
    """Sizes of a decoder with grouped queries and a gated MLP, as its published config.json has them."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Layer -> (output features, input features), of the products that an engine runs: query, key and value are
        one, gate and up another.
        """
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocabulary, self.hidden),
        }


SERVED_MODELS: Mapping[str, ServedModel] = {
    "Qwen3-0.6B": ServedModel(1024, 3072, 16, 8, 128, 151936),
    "Qwen3-4B": ServedModel(2560, 9728, 32, 8, 128, 151936),
    "Qwen3-8B": ServedModel(4096, 12288, 32, 8, 128, 151936),
    "Llama-3.1-8B": ServedModel(4096, 14336, 32, 8, 128, 128256),
}


SERVED_MIXTURES: Mapping[str, tuple[int, int, int, int]] = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
"""Experts of a layer, experts of a token, hidden size, and intermediate size of an expert, of models with experts."""


def served_products() -> Iterator[tuple[str, int, tuple[int, int]]]:
    """(name, tokens, (output features, input features)) of products that these models run, each size once, under the
    name of the first model that has it: "Qwen3-4B o, M=1".

    The most tokens of each class, and a prefill's. A head sees a token of each sequence, so no prefill's.
    """
    seen = set()
    for model, sizes in SERVED_MODELS.items():
        for layer, product in sizes.linears.items():
            if product not in seen:
                seen.add(product)
                for tokens in ROW_CLASSES if layer == "head" else (*ROW_CLASSES, 2048):
                    yield f"{model} {layer}, M={tokens}", tokens, product
