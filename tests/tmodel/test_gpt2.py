"""GPT-2: names with and without their prefix, masks that old files carry, its tokens and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.packed import Driver, in_chunks, load
from tkernels.recording import Recording
from tmodel import PRESETS, RANDOM_PRESETS, ConfigError, WeightError, load_config
from tmodel.quantizers import METHODS
from tmodel.quantizers.checkpoint import choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.random_weights import num_parameters
from tmodel.train import new_model, split_parameters
from tmodel.transformers_models import new_transformers_model
from tsched import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 97,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.3,
}
LENGTHS = (21, 3, 9)
PROMPTS = [[(7 * i + 3 * j) % 97 for j in range(length)] for i, length in enumerate((1, 9, 17, 33))]


def save_random(directory: Path, **fields: Any) -> Any:
    """transformers' model of SIZES, in float32, as it saves it; with biases that are not 0."""
    torch.manual_seed(0)
    model = new_transformers_model({**SIZES, **fields}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return model


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (length,), generator=generator) for length in LENGTHS]


def test_the_embedding_is_a_part_of_a_step(tmp_path: Path) -> None:
    save_random(tmp_path)
    recording = Recording("cpu")
    model = load(tmp_path, torch.float32, max_model_len=64, ranges=recording)
    Driver(model, sequences(), torch.float32).run(in_chunks(LENGTHS, 21))
    assert {span.category for span in recording.spans() if span.name == "embedding"} == {"part"}


def our_logits(directory: Path) -> torch.Tensor:
    """[rows, vocab] over all sequences, in chunks of 7."""
    driver = Driver(load(directory, torch.float32, max_model_len=64), sequences(), torch.float32)
    return torch.cat(driver.run(in_chunks(LENGTHS, 7)))


def rename(directory: Path, prefix: str, extra: dict[str, torch.Tensor]) -> None:
    """Writes the checkpoint again, its names' `transformer.` replaced by `prefix`, with more tensors."""
    file = directory / "model.safetensors"
    tensors = {name.replace("transformer.", prefix): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, **extra}, file)


def test_either_spelling_of_names_is_read_and_masks_are_left_alone(tmp_path: Path) -> None:
    save_random(tmp_path)
    expected = our_logits(tmp_path)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    for prefix in ("", "transformer."):
        masks = {f"{prefix}h.{i}.attn.bias": mask.clone() for i in range(3)}
        masks |= {f"{prefix}h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
        rename(tmp_path, prefix, masks)
        assert ("h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")) == (prefix == "")
        assert torch.equal(our_logits(tmp_path), expected)
        save_random(tmp_path)


def test_a_tied_file_may_keep_the_heads_name_alone(tmp_path: Path) -> None:
    save_random(tmp_path)
    expected = our_logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, file)
    assert torch.equal(our_logits(tmp_path), expected)


def test_a_tensor_that_is_missing_or_of_another_model_is_named(tmp_path: Path) -> None:
    save_random(tmp_path)
    rename(tmp_path, "", {"h.3.ln_1.weight": torch.ones(64)})
    with pytest.raises(WeightError, match=r"unexpected tensor 'transformer\.h\.3\.ln_1\.weight'"):
        load(tmp_path, torch.float32, max_model_len=64)
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_inner": 60}))
    with pytest.raises(WeightError, match=r"h\.0\.mlp\.c_fc\.weight' has shape \[64, 256\], .*asks for \[64, 60\]"):
        load(tmp_path, torch.float32, max_model_len=64)


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_random(tmp_path, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)
    llm = LLM(tmp_path, device="cpu", max_num_batched_tokens=32)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    expected = [
        model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=24, do_sample=False) for row in rows
    ]
    tokens = [made[0, row.shape[1] :].tolist() for made, row in zip(expected, rows, strict=True)]
    assert len({token for some in tokens for token in some}) > 20, "a model that repeats itself proves little"
    assert [list(output.outputs[0].token_ids) for output in outputs] == tokens


@pytest.mark.parametrize("method", ["awq", "squeezellm"])
def test_it_is_quantized_from_names_without_prefix_and_served_so(method: str, tmp_path: Path) -> None:
    """A walk forward whose scales are folded into norms and values, and one backward through the transposed weights."""
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_random(dense)
    expected = our_logits(dense)
    rename(dense, "", {})
    bits = max(METHODS[method].bits)
    job = plan_job(dense, METHODS[method], bits, 32 if METHODS[method].grouped else -1)
    tokens = torch.randint(97, (20 * 24,), generator=torch.Generator().manual_seed(0))
    windows = choose_calibration_windows(job.config, tokens, 24)
    quantize_checkpoint(dataclasses.replace(job, windows=windows), out, lambda step: None)
    config = load_config(out)
    assert config.quantization is not None
    assert all(None not in config.quantization.schemes(shape) for shape in config.linears())
    far = (our_logits(out).log_softmax(-1) - expected.log_softmax(-1)).abs().mean()
    assert 0 < far < 1, "not quantized, or a wrong model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'; GPT-2 is supported with 'gelu_new'"),
        ({"activation_function": "gelu_newer"}, "did you mean 'gelu_new'"),
        ({"n_head": 5}, "n_embd=64 is not a multiple of n_head=5"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
        ({"n_layer": 0}, "n_layer: .*greater than 0"),
        ({"n_embd": ...}, "n_embd: Field required"),
        ({"n_inner": 0}, "n_inner: .*greater than 0"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {name: value for name, value in {**SIZES, **fields}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(tmp_path)


def test_the_preset_has_the_published_size() -> None:
    assert num_parameters(RANDOM_PRESETS["gpt2"]) == 124_439_808


def test_what_is_looked_up_is_no_matrix_to_train() -> None:
    model = new_model(PRESETS["tiny-gpt2"], 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, vectors = ([names[id(parameter)] for parameter in part] for part in split_parameters(model))
    assert len(matrices) == 4 * 2
    assert all("attn.c_" in name or "mlp.c_" in name for name in matrices)
    assert {"transformer.wte.weight", "transformer.wpe.weight"} < set(vectors)
    assert len(matrices) + len(vectors) == len(names)
