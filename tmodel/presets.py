"""Models that any machine can make for itself, by name: small real ones from a recipe, large ones of random weights."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from tkernels.files import new_folder
from tmodel.corpus import standard_library_corpus
from tmodel.random_weights import PRESET_TABLE, RANDOM_PRESETS, VERSION, write_random
from tmodel.train import CHAT_TEMPLATE, Recipe, TrainingReport, train_on

PRESETS = {name: Recipe(**recipe) for name, recipe in PRESET_TABLE["trained"].items()}
"""Each takes about a minute on two idle cores (65 to 79 s of CPU), most of it matrix products: 1,000 steps of 1,024
tokens. tiny is a Qwen3, the others are named for their architectures; tiny-mistral learns with a window of half its
sequences. The others have no norm on queries and keys, so Muon takes a quarter of tiny's rate: at tiny's own their
attention scores grow to hundreds and they learn less (tiny-llama: 3.69 held-out nats a token, 3.33 at a quarter).

tiny-moe is tiny with experts, a token's two together as wide as tiny's MLP; it takes half as long again, as Muon has
more matrices. At a router_aux_loss_coef of 0.01 its second layer's load had 0.83 of the largest entropy, at 0.03 0.99.
"""


def make_model(preset: str, directory: str | Path, *, seed: int = 0) -> TrainingReport:
    """Train `preset` and save it as `directory`, which must not exist yet (or be empty), in one to three minutes.

    The directory appears whole or not at all. A training that was cut off goes on where it stopped. Raises
    ValueError for an unknown preset, FileExistsError for a directory in use, TrainingError where the result does not
    beat a bigram model.
    """
    return make_from_recipe(find_recipe(preset), Path(directory), seed=seed)


def make_random_model(preset: str, directory: str | Path, *, seed: int = 0) -> None:
    """Save `preset`, one of RANDOM_PRESETS, with random weights as `directory`; like `make_model`."""
    shape = RANDOM_PRESETS[preset]
    with new_folder(Path(directory), "a model") as unfinished:
        write_random(shape, unfinished, seed)


def preset_path(preset: str) -> Path:
    """The directory of `preset` in the user's cache folder, made there on first use.

    Two processes that ask at once make it once: the second waits for the first. A folder's name carries a hash of the
    recipe, the chat template and the Python version whose library is the text, or of the shape that the random weights
    have.
    """
    make: Callable[[Path], Any]
    if preset in RANDOM_PRESETS:
        made_of = json.dumps([dict(RANDOM_PRESETS[preset]), VERSION], sort_keys=True)
        make = lambda directory: make_random_model(preset, directory)  # noqa: E731
    else:
        recipe = find_recipe(preset)
        made_of = json.dumps([asdict(recipe), platform.python_version(), CHAT_TEMPLATE], sort_keys=True)
        make = lambda directory: make_from_recipe(recipe, directory, seed=0)  # noqa: E731
    directory = cache_folder() / f"{preset}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.parent / f"{directory.name}.lock"):
            if not directory.exists():
                make(directory)
    return directory


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tkernels, or ~/.cache/tkernels where that is unset or relative (as the XDG specification
    asks).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tkernels"


def find_recipe(preset: str) -> Recipe:
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known are: {', '.join([*PRESETS, *RANDOM_PRESETS])}")
    return PRESETS[preset]


def make_from_recipe(recipe: Recipe, directory: Path, *, seed: int) -> TrainingReport:
    """`make_model` for a recipe without a name."""
    state = directory.with_name(f".{directory.name}.training")
    with new_folder(directory, "a model") as unfinished:
        corpus = standard_library_corpus(recipe.corpus_bytes)
        model, tokenizer, report = train_on(corpus, recipe, seed, state)
        with _no_progress_bars():
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        (unfinished / "training.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers without bars of its own, which would stand among those of whoever makes the model."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
