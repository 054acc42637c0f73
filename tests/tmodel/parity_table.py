"""Each architecture beside transformers, on the random shapes of the tests or on the trained presets, as a table.

Of each it has the largest difference of any logit in float32, by schedule, and for each dtype our largest RMS distance
of any schedule from transformers in float64, over transformers' own. What is beyond the tests' bounds exits with 1.
Experts are those of float64 in both; a further row has the distances where each chooses its own, for which there is no
bound: a choice that falls another way is as far as the experts are from each other.

python -m tests.tmodel.parity_table
python -m tests.tmodel.parity_table --trained
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from tests.tmodel.packed import load
from tests.tmodel.test_parity import (
    LARGEST_DIFFERENCE,
    LARGEST_RATIO,
    LENGTHS,
    SCHEDULES,
    SHAPES,
    distances_to_float64,
    first_shape,
    packed_logits,
    random_model,
    random_sequences,
    transformers_logits,
)
from tmodel import PRESETS, known_architectures, preset_path
from tmodel.corpus import standard_library_corpus
from tmodel.fields import ExpertsConfig
from tmodel.train import encode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WINDOW = 128  # of held-out tokens


def largest_differences(directory: Path, sequences: Sequence[torch.Tensor]) -> list[float]:
    """Of float32 logits from transformers', over all rows, by schedule."""
    expected = transformers_logits(directory, sequences, torch.float32)
    model = load(directory, torch.float32)
    found = [packed_logits(model, sequences, torch.float32, schedule) for schedule in SCHEDULES]
    return [float((logits - expected).abs().max()) for logits in found]


def ratio(directory: Path, dtype: torch.dtype, sequences: Sequence[torch.Tensor], *, forced: bool = True) -> float:
    """Our largest RMS distance from float64 of any schedule, over transformers' own."""
    ours, theirs = distances_to_float64(directory, dtype, sequences, forced=forced)
    return max(ours.values()) / theirs


def random_rows(architectures: Collection[str]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """(architecture, what was compared, largest differences by schedule, ratios by dtype)"""
    sequences = random_sequences(LENGTHS)
    for architecture in architectures:
        shapes = [shape for shape in SHAPES if shape.architecture == architecture]
        differences: list[list[float]] = []
        for shape in shapes:
            with tempfile.TemporaryDirectory() as folder:
                directory = random_model(Path(folder), architecture=architecture, **shape.fields)
                differences.append(largest_differences(directory, sequences))
        ratios = random_ratios(architecture, forced=True)
        rows = sum(LENGTHS) * len(SCHEDULES) * len(shapes)
        largest = [max(of_schedule) for of_schedule in zip(*differences, strict=True)]
        yield architecture, f"{len(shapes)} random shapes, {rows:,} rows", largest, ratios
        if issubclass(known_architectures()[architecture].fields, ExpertsConfig):
            yield architecture, "each by its own routing", [], random_ratios(architecture, forced=False)


def random_ratios(architecture: str, *, forced: bool) -> list[float]:
    """Of an architecture's first shape by dtype, over 1,024 rows."""
    ratios = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            directory = random_model(Path(folder), dtype, architecture, **first_shape(architecture).fields)
            ratios.append(ratio(directory, dtype, random_sequences((64,) * 16), forced=forced))
    return ratios


def trained_rows(architectures: Collection[str]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """As `random_rows`, of the trained presets, on text that they were not trained on."""
    from transformers import AutoTokenizer

    for preset, recipe in PRESETS.items():
        (architecture,) = recipe.config["architectures"]
        if architecture not in architectures:
            continue
        directory = preset_path(preset)
        tokens = encode(AutoTokenizer.from_pretrained(directory), standard_library_corpus(recipe.corpus_bytes).held_out)
        sequences = list(tokens[: 6 * _WINDOW].split(_WINDOW))
        differences = largest_differences(directory, sequences)
        ratios = [ratio(directory, dtype, sequences) for dtype in DTYPES]
        rows = len(sequences) * _WINDOW * len(SCHEDULES)
        yield architecture, f"{preset}, {rows:,} rows", differences, ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tmodel.parity_table", description=__doc__)
    parser.add_argument("--trained", action="store_true", help="the trained presets, which are made where they are not")
    parser.add_argument("architectures", nargs="*", help="all, where none is named")
    arguments = parser.parse_args()
    rows = trained_rows if arguments.trained else random_rows
    columns = ["architecture", "compared", *SCHEDULES, *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    too_far = False
    for architecture, what, differences, ratios in rows(arguments.architectures or known_architectures()):
        compared = [f"{one:.1e}" for one in differences] or [""] * len(SCHEDULES)
        figures = [*compared, *(f"{one:.2f}x" for one in ratios)]
        print(f"| `{architecture}` | {' | '.join([what, *figures])} |", flush=True)
        if differences:
            too_far |= max(differences) > LARGEST_DIFFERENCE or max(ratios) > LARGEST_RATIO
    if too_far:
        sys.exit(f"a difference is above {LARGEST_DIFFERENCE:g}, or a ratio above {LARGEST_RATIO:g}")


if __name__ == "__main__":
    main()
