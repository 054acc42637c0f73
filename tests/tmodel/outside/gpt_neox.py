"""GPT-NeoX, as a user adds it: attention and MLP side by side on one residual, LayerNorm, biases, partial rotary.

Source: Black et al., GPT-NeoX-20B, 2022, section 2.1; fields and tensor names as in transformers' `GPTNeoXForCausalLM`.
"""

import torch
from pydantic import PositiveFloat, PositiveInt

from tkernels import KernelSet
from tmodel.batch import Batch, KVCache
from tmodel.config import Architecture, Axes, Limits, ModelConfig
from tmodel.fields import RotaryConfig
from tmodel.json_files import ConfigError
from tmodel.kernel_axes import attention_axes, layer_norm_axes, linear_axes, rotary_axes
from tmodel.layers import PagedAttention, count_weight_bytes
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.rotary import Rope
from tmodel.weights import Checkpoint


class NeoXConfig(RotaryConfig):
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    hidden_act: str = "gelu"
    max_position_embeddings: PositiveInt = 2048
    layer_norm_eps: PositiveFloat = 1e-5
    rotary_pct: PositiveFloat = 0.25
    use_parallel_residual: bool = True
    attention_bias: bool = True
    eos_token_id: int | list[int] | None = 2


def resolve(fields: NeoXConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    if fields.hidden_act != "gelu" or not fields.use_parallel_residual or fields.tie_word_embeddings:
        raise ConfigError("GPT-NeoX is supported with hidden_act 'gelu', use_parallel_residual and a head of its own")
    return ModelConfig(
        architecture=ARCHITECTURE,
        fields=fields,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_attention_heads,
        head_dim=fields.hidden_size // fields.num_attention_heads,
        windows=(None,) * fields.num_hidden_layers,
        max_position_embeddings=fields.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        dtype=fields.resolved_dtype(),
    )


def rope(config: ModelConfig) -> Rope:
    share = config.fields.rope_parameters.partial_rotary_factor or config.fields.rotary_pct
    return Rope(int(config.head_dim * share), config.fields.rope_parameters)


def layer_linears(config: ModelConfig, index: int) -> list[LinearShape]:
    """(query, key and value, a head's three after another; output; up; down)"""
    name, hidden, width = f"gpt_neox.layers.{index}", config.fields.hidden_size, config.fields.intermediate_size
    qkv, bias, dim = f"{name}.attention.query_key_value", config.fields.attention_bias, config.head_dim
    values = tuple(range((3 * head + 2) * dim, (3 * head + 3) * dim) for head in range(config.num_heads))
    norms = Feed(f"{name}.input_layernorm"), Feed(f"{name}.post_attention_layernorm")
    return [
        LinearShape((qkv,), (3 * hidden,), hidden, bias, fed_by=norms[0]),
        LinearShape((f"{name}.attention.dense",), (hidden,), hidden, bias, fed_by=Feed(qkv, values)),
        LinearShape((f"{name}.mlp.dense_h_to_4h",), (width,), hidden, bias=True, gelu="erf", fed_by=norms[1]),
        LinearShape((f"{name}.mlp.dense_4h_to_h",), (hidden,), width, bias=True),
    ]


def linears(config: ModelConfig) -> list[LinearShape]:
    return [shape for index in range(config.num_layers) for shape in layer_linears(config, index)]


def head_shape(config: ModelConfig) -> LinearShape:
    return LinearShape(("embed_out",), (config.vocab_size,), config.fields.hidden_size)


def norms(config: ModelConfig, index: int) -> list[str]:
    name = f"gpt_neox.layers.{index}"
    return [f"{name}.{norm}.{part}" for norm in NORMS for part in ("weight", "bias")]


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.fields.hidden_size
    shapes = {"gpt_neox.embed_in.weight": (config.vocab_size, hidden)}
    shapes |= {f"gpt_neox.final_layer_norm.{part}": (hidden,) for part in ("weight", "bias")}
    shapes |= {name: (hidden,) for index in range(config.num_layers) for name in norms(config, index)}
    every = [*linears(config), head_shape(config)]
    return shapes | {name: size for shape in every for name, size in shape.tensors().items()}


def axes(config: ModelConfig, limits: Limits) -> Axes:
    return {
        **linear_axes([*linears(config), head_shape(config)], config.quantization, limits),
        "layer_norm": layer_norm_axes(config.fields.hidden_size, limits)["layer_norm"],
        **rotary_axes(config, limits, rope(config).dim, head_norms=False),
        **attention_axes(config, limits),
    }


class NeoX:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, kernels: KernelSet) -> None:
        self.config, self.kernels, self.eps = config, kernels, config.fields.layer_norm_eps
        reader, shapes = LinearReader(checkpoint, kernels, config.quantization), tensors(config)

        def read(*names: str) -> list[torch.Tensor]:
            return [checkpoint.tensor(name, shapes[name]) for name in names]

        (self.embedding,) = read("gpt_neox.embed_in.weight")
        self.final_norm = read("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias")
        self.norms = [read(*norms(config, index)) for index in range(config.num_layers)]
        self.layers = [
            [reader.gelu(shape) if shape.gelu else reader.linear(shape) for shape in layer_linears(config, index)]
            for index in range(config.num_layers)
        ]
        self.head = reader.linear(head_shape(config))
        self.rotation = rope(config).tables(
            config.max_position_embeddings,
            kernels.greatest("qk_norm_rope_scatter", "L"),
            dtype=checkpoint.dtype,
            device=checkpoint.device,
        )
        self.prepare_report = reader.report

    @property
    def weight_bytes(self) -> int:
        return count_weight_bytes([self.embedding, self.final_norm, self.norms, self.layers, self.head])

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        heads, dim = self.config.num_heads, self.config.head_dim
        norm = self.kernels.layer_norm
        step = PagedAttention(self.kernels, batch, dim**-0.5)
        hidden = self.embedding.index_select(0, batch.token_ids)  # [T, H]
        for (qkv, output, up, down), norms, (k_cache, v_cache) in zip(self.layers, self.norms, kv_cache, strict=True):
            q, k, v = qkv(norm(hidden, *norms[:2], self.eps)).view(-1, heads, 3, dim).unbind(2)  # [T, heads, D] each
            self.kernels.qk_norm_rope_scatter(q, k, v, *self.rotation, batch.positions, k_cache, v_cache, batch.slots)
            attended = output(step(q, k_cache, v_cache, None).flatten(1))
            hidden = hidden + attended + down(up(norm(hidden, *norms[2:], self.eps)))
        logits = self.head(norm(hidden[batch.logit_indices], *self.final_norm, self.eps))  # [n, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()


NORMS = ("input_layernorm", "post_attention_layernorm")
ARCHITECTURE = Architecture(
    "GPTNeoXForCausalLM", NeoXConfig, resolve, tensors, axes, NeoX, linears=linears, layers="gpt_neox.layers"
)
