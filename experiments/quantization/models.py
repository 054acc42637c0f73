"""The quantized models of an experiment: which they are, the texts they are made and judged with, and their folders."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import tmodel
from experiments.document import Document, ExperimentError, PathParts
from experiments.quantization.evaluation import cut_windows
from experiments.quantization.texts import read_text, tokenize_text
from experiments.schema import Experiment, Quantization
from tmodel.corpus import standard_library_corpus
from tmodel.formats.base import ScaledScheme
from tmodel.quantizers import METHODS, Method
from tmodel.quantizers.calibration import MAX_TOKENS
from tmodel.quantizers.checkpoint import check_settings, choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.quantizers.unfinished import QuantizerError
from tsched.torch_free import suggest_name

_CORPUS_BYTES = 8_000_000
"""The presets are trained on as much, in the same order: what is held out here was held out there."""

_BYTES_A_TOKEN = 8
"""More text than tokens are wanted of is not read: no tokenizer packs code this tightly in the mean."""


@dataclass(frozen=True)
class QuantizedModel:
    """A method with its settings; `options` are those that it is told, by name."""

    method: str
    bits: int
    group_size: int
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def told(self) -> str:
        """The method, that inputs are quantized too, and its options: "fp8 W8A8", "gptq (act_order groups)"."""
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        scheme = METHODS[self.method].format(self.bits, self.group_size).scheme("any")
        inputs_too = f" W{self.bits}A{self.bits}" if isinstance(scheme, ScaledScheme) else ""
        return f"{self.method}{inputs_too} ({options})" if options else f"{self.method}{inputs_too}"

    @property
    def label(self) -> str:
        """ "gptq 4 bits, groups of 32"."""
        return f"{self.told} {self.bits} bits" + ("" if self.group_size == -1 else f", groups of {self.group_size}")

    def configure(self) -> Method:
        """The method with the options. QuantizerError where it has no such ones."""
        return METHODS[self.method].with_options(dict(self.options))


def list_quantized_models(quantization: Quantization) -> list[QuantizedModel]:
    """In the YAML's order, the group size varying fastest and options slowest."""
    return [
        QuantizedModel(method, bits, group_size, tuple(zip(settings.options, values, strict=True)))
        for method, settings in quantization.methods.items()
        for *values, bits, group_size in product(*settings.options.values(), settings.bits, settings.group_size)
    ]


def find_quantization_faults(
    document: Document, experiment: Experiment, config: tmodel.ModelConfig | None, model_place: PathParts
) -> list[str]:
    """What is wrong with an experiment's `quantization`, as far as the model's configuration tells; None is where that
    is not known.
    """
    quantization = experiment.quantization
    if quantization is None:
        return []
    problems = []
    for method in quantization.methods:
        if method not in METHODS:
            message = f"unknown method {method!r}: there is {', '.join(METHODS)}{suggest_name(method, METHODS)}"
            problems.append(document.problem(("quantization", "methods", method), message))
    for one in list_quantized_models(quantization):
        if one.method in METHODS:
            problems += _find_settings_faults(document, one, config)
    if config is None:
        return problems
    if config.quantization is not None:
        problems.append(document.problem(model_place, "is quantized already; quantization takes a dense model"))
    longest = config.max_position_embeddings
    if quantization.window > longest:
        message = f"{quantization.window} tokens, and the model was made for {longest}"
        problems.append(document.problem(("quantization", "window"), message))
    return problems


def _find_settings_faults(document: Document, one: QuantizedModel, config: tmodel.ModelConfig | None) -> list[str]:
    """What is wrong with a method's options, or, where the model is known, with its bits and group size for it."""
    place: PathParts = ("quantization", "methods", one.method)
    try:
        method = one.configure()
    except QuantizerError as error:
        return [document.problem((*place, "options"), str(error))]
    if config is None:
        return []
    try:
        check_settings(config, method, one.bits, one.group_size)
    except QuantizerError as error:
        return [document.problem(place, str(error))]
    return []


@dataclass(frozen=True)
class Texts:
    """calibration: [T] tokens. windows: [n, window + 1] of what the models are judged by."""

    calibration: torch.Tensor
    windows: torch.Tensor


def read_texts(quantization: Quantization, folder: Path, directory: Path) -> Texts:
    """The experiment's texts as tokens of the model in `directory`; its paths start from `folder`."""
    calibration, text = (
        read_text(folder / file, "quantization:") if file is not None else None
        for file in (quantization.calibration, quantization.text)
    )
    if calibration is None or text is None:
        corpus = standard_library_corpus(_CORPUS_BYTES)
        calibration = calibration or "\n".join(corpus.training)[: _BYTES_A_TOKEN * MAX_TOKENS]
        text = text or "\n".join(corpus.held_out)[: _BYTES_A_TOKEN * quantization.max_tokens]
    tokens = tokenize_text(text, directory)[: quantization.max_tokens + 1]
    if len(tokens) <= quantization.window:
        raise ExperimentError([f"quantization: a text of {len(tokens)} tokens has no window of {quantization.window}"])
    return Texts(tokenize_text(calibration, directory), cut_windows(tokens, quantization.window))


def make_checkpoint(
    one: QuantizedModel, model: tmodel.ModelPlan, texts: Texts, cache: Path, progress: Callable[[str], None]
) -> Path:
    """The folder of `one` in `cache`, made where it is not there. Its name has a hash of all that decides what is in
    it: the dense model's files, the settings, the calibration windows, and the code of quantizers and formats.
    """
    source = model.directory()
    job = plan_job(source, one.configure(), one.bits, one.group_size, model.architectures)
    if job.method.walk != "none":
        window = texts.windows.shape[1] - 1
        job = replace(job, windows=choose_calibration_windows(job.config, texts.calibration, window))
    made_of = hashlib.sha256(json.dumps(job.options(), sort_keys=True).encode())
    for folder in ("quantizers", "formats"):
        for file in sorted((Path(tmodel.__file__).parent / folder).glob("*.py")):
            made_of.update(file.read_bytes())
    group = "" if one.group_size == -1 else f"-g{one.group_size}"
    out = cache / f"{source.name}-{one.method}-{one.bits}bit{group}-{made_of.hexdigest()[:12]}"
    if not out.exists():
        quantize_checkpoint(job, out, progress)
    return out
