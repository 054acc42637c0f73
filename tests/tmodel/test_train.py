"""Training at a scale of seconds: it loads, comes out the same each time, and is refused where it learned nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tmodel import PRESETS, Recipe, TrainingError, load_config, make_model, presets, train
from tmodel.corpus import CorpusError, standard_library_corpus
from tmodel.expert_load import balance_loss
from tmodel.presets import make_from_recipe, preset_path
from tmodel.train import CHAT_TEMPLATE, StackedMuon, as_loaded, bigram_loss, encode, new_model, train_tokenizer
from tmodel.training_state import load_state, save_state

SMALL = Recipe(
    version=0,
    config={
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 280,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    corpus_bytes=300_000,
    sequence_len=64,
    batch_size=8,
    num_steps=150,
    matrix_learning_rate=0.04,
    vector_learning_rate=0.01,
)
SMALL_MOE = replace(
    SMALL,
    config={
        **SMALL.config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
        "router_aux_loss_coef": 0.03,
    },
)


def test_a_trained_model_is_complete_reproducible_and_better_than_a_bigram(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import is_progress_bar_enabled

    bars = is_progress_bar_enabled()
    report = make_from_recipe(SMALL, tmp_path / "first", seed=3)
    assert "Writing model" not in capfd.readouterr().err
    assert is_progress_bar_enabled() == bars
    assert make_from_recipe(SMALL, tmp_path / "second", seed=3).held_out_loss == report.held_out_loss
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "first").chat_template == CHAT_TEMPLATE

    assert report.held_out_loss < report.bigram_loss < math.log(SMALL.vocab_size)
    assert json.loads((tmp_path / "first" / "training.json").read_text())["held_out_loss"] == report.held_out_loss
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]  # nothing half-made is left

    config = load_config(tmp_path / "first")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 2, 1, 32)
    assert config.fields.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert config.eos_token_ids == (tokenizer.eos_token_id,)
    text = "def f(x):\n    return {'ключ': x}\t# \U0001f40d\n"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < config.vocab_size
    assert tokenizer.decode(ids) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), config.vocab_size)


@pytest.mark.parametrize("recipe", [SMALL, SMALL_MOE], ids=["dense", "experts"])
def test_an_interrupted_training_goes_on_to_the_same_weights(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_SECONDS_BETWEEN_STATES", 0.0)
    monkeypatch.setattr(train, "_SECONDS_BETWEEN_LINES", 0.0)
    make_from_recipe(recipe, tmp_path / "whole", seed=3)
    said = capfd.readouterr().err
    assert said.startswith("training on Python's own sources, once: a tokenizer, then 150 steps on 1 threads")
    assert "training: step 150 of 150, loss" in said

    steps = 0
    read = train._read

    def interrupted_read(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 101:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(train, "_read", interrupted_read)
    with pytest.raises(KeyboardInterrupt):
        make_from_recipe(recipe, tmp_path / "cut", seed=3)
    assert "goes on from step 100 when it is asked for again" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cut.training", "whole"]
    make_from_recipe(recipe, tmp_path / "cut", seed=3)
    assert "training: step 101 of 150" in (said := capfd.readouterr().err)
    assert "training: step 100 of 150" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]
    cut, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_on_a_terminal_a_training_is_a_bar_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    monkeypatch.setattr(train, "Console", lambda stderr: Console(file=written, force_terminal=True, color_system=None))
    with train._shown_progress(100, SMALL) as show:
        show(150, 2.5)
    assert re.search(r"training .*loss 2\.500 .*0:00:00", written.getvalue())


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    shares = [train._learning_rate_share(step, 1000) for step in range(1001)]
    assert shares[:3] == [1 / 30, 2 / 30, 3 / 30]
    assert set(shares[29:601]) == {1.0}
    assert shares[700] == pytest.approx(0.75)
    assert shares[1000] == 0.0


@pytest.mark.parametrize("what", ["torn", "another seed"])
def test_a_state_of_no_use_is_left_alone_and_training_starts_anew(what: str, tmp_path: Path) -> None:
    model, order = torch.nn.Linear(2, 2), torch.Generator().manual_seed(1)
    optimizers = [torch.optim.AdamW(model.parameters())]
    save_state(tmp_path / "state", 7, model, optimizers, order, "seed 0")
    if what == "torn":
        (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:100])
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        assert load_state(tmp_path / "state", model, optimizers, order, "seed 0" if what == "torn" else "seed 1") == 0
    assert all(map(torch.equal, before, model.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_model_that_learned_nothing_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"held-out loss, 5\.\d+ nats a token, does not beat"):
        make_from_recipe(replace(SMALL, num_steps=1), tmp_path / "model", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_experts_learn_to_share_the_tokens_or_the_model_is_refused(tmp_path: Path) -> None:
    report = make_from_recipe(SMALL_MOE, tmp_path / "even", seed=0)
    assert report.load_entropies is not None
    (entropy,) = report.load_entropies  # of its one layer
    assert 0.8 <= entropy < 1
    assert json.loads((tmp_path / "even" / "training.json").read_text())["load_entropies"] == [entropy]
    saved = load_file(tmp_path / "even" / "model.safetensors")
    experts = {name: value.shape for name, value in saved.items() if ".mlp." in name}
    prefix = "model.layers.0.mlp"
    assert experts.pop(f"{prefix}.gate.weight") == (4, 64)
    up_and_down = {"gate_proj": (64, 64), "up_proj": (64, 64), "down_proj": (64, 64)}
    assert experts == {f"{prefix}.experts.{e}.{p}.weight": s for e in range(4) for p, s in up_and_down.items()}

    uneven = {**SMALL_MOE.config, "router_aux_loss_coef": -1.0}  # what it rewards is to leave experts out
    with pytest.raises(TrainingError, match=r"entropy of their load, .*, is 0\.\d+ by layer, and 0\.8 is the least"):
        make_from_recipe(replace(SMALL_MOE, config=uneven), tmp_path / "uneven", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["even"]


def test_the_balance_term_moves_the_router_alone_and_the_loss_of_a_dense_model_has_none() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense, routed = (new_model(recipe, 0) for recipe in (SMALL, SMALL_MOE))
    windows = torch.arange(2 * 65).view(2, 65)
    assert train._balance_term(dense, train._read(dense, windows)[1]) == 0.0
    loss, logits = train._read(routed, windows)
    assert [one.shape for one in logits] == [(2 * 64, 4)]
    assert loss.item() == pytest.approx(routed(input_ids=windows, labels=windows).loss.item(), rel=1e-6)
    term = train._balance_term(routed, logits)
    assert isinstance(term, torch.Tensor)
    assert term.item() == pytest.approx(0.03 * balance_loss(logits[0], 2).item())
    term.backward()
    moved = {name for name, parameter in routed.named_parameters() if parameter.grad is not None}
    assert "model.layers.0.mlp.gate.weight" in moved
    assert not {name for name in moved if ".experts." in name or "lm_head" in name}


def test_a_stack_is_updated_as_its_matrices_are_one_by_one() -> None:
    def matrices(mixed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [matrix for one in mixed for matrix in (one.unbind() if one.ndim == 3 else [one])]

    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        [torch.randn(size, generator=generator) for size in ((3, 6, 4), (5, 4), (2, 4, 6))] for _ in range(4)
    )
    stacked = [torch.nn.Parameter(one.clone()) for one in start]
    alone = [torch.nn.Parameter(one.clone()) for one in matrices(start)]
    ours, theirs = StackedMuon(stacked, 0.1), torch.optim.Muon(alone, lr=0.1, momentum=0.95, weight_decay=0.0)
    for rate, gradient in zip((0.1, 0.2, 0.05), gradients, strict=True):
        for parameters, of_step in ((stacked, gradient), (alone, matrices(gradient))):
            torch.autograd.backward(parameters, of_step)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in stacked)
        assert all(map(torch.equal, matrices(stacked), alone))
    assert not any(map(torch.equal, start, stacked))


def test_a_directory_in_use_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        make_model("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_preset_lists_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown preset 'huge'; known are: tiny"):
        make_model("huge", tmp_path / "model")


def test_the_corpus_is_whole_files_in_a_fixed_order_and_the_parts_share_none() -> None:
    corpus = standard_library_corpus(1_000_000)
    assert corpus == standard_library_corpus(1_000_000)
    assert not set(corpus.training) & set(corpus.held_out)
    larger = standard_library_corpus(2_000_000)
    assert larger.training[: len(corpus.training)] == corpus.training
    assert 0.5e6 < sum(map(len, corpus.training)) < 1.3e6
    assert len(corpus.held_out) >= 2
    with pytest.raises(CorpusError, match="the recipe asks for 1000000000000"):
        standard_library_corpus(10**12)


def test_a_library_of_less_than_half_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a.py", 600), ("b/c.py", 400), ("test/d.py", 5000), ("e.txt", 5000), ("f.py", 200_001)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#" * size)
    monkeypatch.setattr("tmodel.corpus.sysconfig.get_path", lambda name: str(tmp_path))
    corpus = standard_library_corpus(2001)
    assert sorted(map(len, corpus.training + corpus.held_out)) == [400, 600]
    with pytest.raises(CorpusError, match="found 1000 bytes of Python source, the recipe asks for 2002"):
        standard_library_corpus(2002)


def test_a_step_reads_whole_windows_and_a_token_that_never_comes_keeps_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing decays: a row changes by its gradients alone."""
    read: list[torch.Tensor] = []
    as_it_was = train._read

    def recorded(model: Any, windows: torch.Tensor) -> Any:
        read.append(windows)
        return as_it_was(model, windows)

    monkeypatch.setattr(train, "_read", recorded)
    recipe = replace(SMALL, config={**SMALL.config, "tie_word_embeddings": False}, num_steps=2, batch_size=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = new_model(recipe, 0)
    rows = model.get_input_embeddings().weight
    before = rows.detach().clone()
    monkeypatch.setattr(train, "_SECONDS_BETWEEN_STATES", math.inf)
    train.train(model, torch.arange(200) % 10, recipe, 0, tmp_path / "state")
    assert not (tmp_path / "state").exists(), "a state is not of every step"
    assert [windows.shape for windows in read] == [(2, SMALL.sequence_len + 1)] * 2
    assert all(bool(((windows[:, 1:] - windows[:, :-1]) % 10 == 1).all()) for windows in read)
    assert torch.equal(rows[10:], before[10:])
    assert not (rows[:10] == before[:10]).all(1).any()


def test_the_bigram_model_is_a_distribution_and_finds_what_repeats() -> None:
    vocab = 5
    training = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 3])  # 4 never occurs; 3 is followed by nothing
    for previous in range(vocab):
        pairs = [torch.tensor([previous, following]) for following in range(vocab)]
        total = sum(math.exp(-bigram_loss(training, pair, vocab)) for pair in pairs)
        assert total == pytest.approx(1.0, abs=1e-12)
    # c(0, 1) = 3 of 3, one kind of successor, p(1) = (3 + 1) / (8 + 5).
    assert math.exp(-bigram_loss(training, torch.tensor([0, 1]), vocab)) == pytest.approx(2.25 / 3 + 0.25 * 4 / 13)
    # After 4 nothing is known but p: 0 followed twice and began three pairs, 3 followed once and began none.
    for following, times in ((0, 2), (3, 1), (4, 0)):
        loss = bigram_loss(training, torch.tensor([4, following]), vocab)
        assert math.exp(-loss) == pytest.approx((times + 1) / 13)


def test_texts_are_closed_by_the_end_token() -> None:
    tokenizer = train_tokenizer(["for x in y: pass"] * 3, 280)
    row = encode(tokenizer, ["for x", "in y"])
    assert row.dtype == torch.int64
    assert (row == tokenizer.eos_token_id).nonzero().flatten().tolist()[-1] == len(row) - 1
    assert tokenizer.decode(row) == "for x<|endoftext|>in y<|endoftext|>"
    assert not tokenizer.clean_up_tokenization_spaces  # else older readers drop spaces ahead of points


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_reads_the_tokens_that_it_was_trained_on(preset: str, tmp_path: Path) -> None:
    """transformers gives some architectures a tokenizer of its own making, whatever is saved beside them."""
    from transformers import AutoTokenizer

    texts = ["def scan(line_2024):\n\n\n    return don't  # 'ключ' ", "import  os\r\n\t\tx"] * 20
    tokenizer = train_tokenizer(texts, 280)
    model = new_model(PRESETS[preset], tokenizer.eos_token_id)
    trained_on = as_loaded(tokenizer, model.config)
    model.config.save_pretrained(tmp_path)
    trained_on.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert torch.equal(encode(loaded, texts), encode(trained_on, texts))
    assert (loaded.eos_token_id, loaded.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)
    for text in texts[:2]:
        ids = loaded(text)["input_ids"]
        assert ids == encode(loaded, [text]).tolist()[:-1]
        assert loaded.decode(ids) == text


def _make_in_cache(cache: str) -> tuple[Path, bool]:
    """(the preset's directory, whether this process trained it); runs in a process of its own."""
    os.environ["XDG_CACHE_HOME"] = cache
    presets.PRESETS["tiny"] = SMALL
    with mock.patch.object(presets, "make_from_recipe", wraps=make_from_recipe) as made:
        return preset_path("tiny"), made.called


def test_two_processes_that_ask_at_once_train_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        (path, first), (same_path, second) = pool.map(_make_in_cache, [str(tmp_path)] * 2)
    assert path == same_path
    assert path.parent == tmp_path / "tkernels"
    assert first != second
    assert load_config(path).vocab_size == SMALL.vocab_size
