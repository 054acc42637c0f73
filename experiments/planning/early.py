"""Refusing an experiment before torch is imported, where nothing that needs it could have more to say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError, in_order, read_document
from experiments.planning.axes import choices_of
from experiments.planning.names import preset_table
from experiments.planning.structure import Layout, Part, layouts_of
from experiments.schema import PromptsWorkload, SyntheticWorkload, VariantChoice

CALLED: Mapping[str, str | None] = {
    "matmul": None, "rms_norm": None, "add_rms_norm": None, "paged_decode": None, "paged_prefill": None,
    "gate_up_swiglu": None, "qk_norm_rope_scatter": None,
    "swiglu": "gate_up_swiglu", "qk_norm_rope": "qk_norm_rope_scatter", "kv_scatter": "qk_norm_rope_scatter",
}  # fmt: skip
"""Ops that every preset calls; of a part, the fusion that composes it where no other variant of that is chosen."""

_PLAIN = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "kv_cache_bytes", "order", "prefix_cache",
    "overlap", "cuda_graphs",
)  # fmt: skip
"""Scheduler options that go with any value of the others, as far as `_is_plain` looks at them."""

_WIDEST = 8  # bytes of a number in a cache


def refuse_early(file: Path, overrides: Sequence[str]) -> None:
    """Raises ExperimentError with all that is wrong, where a model and the live registry would have nothing to add."""
    layouts = layouts_of(read_document(file, overrides))
    problems = [problem for layout in layouts for problem in layout.problems]
    if problems and not any(_says_more(layout) for layout in layouts):
        raise ExperimentError(in_order(problems))


def _says_more(layout: Layout) -> bool:
    """Whether torch may be needed to say what is wrong: with pins, shapes and outside variants; with a model whose
    configuration has to be read; with sizes that are not small.
    """
    document = layout.document
    kernels = document.data.get("kernels")
    choices = [choice for op in (kernels if isinstance(kernels, dict) else {}) for choice in choices_of(document, op)]
    if any(isinstance(choice, VariantChoice) and choice.pins for choice in choices):
        return True
    if any(document.data.get(section) for section in ("shapes", "variants_from", "quantization")):
        return True
    if document.data.get("device") not in (None, "cpu"):
        return True
    presets = preset_table()["trained"]
    return any(not _is_plain(part, presets) for part in layout.parts)


def _is_plain(part: Part, presets: Mapping[str, Any]) -> bool:
    experiment = part.experiment
    if experiment.model is None:
        return True
    preset = presets.get(experiment.model.preset or "")
    if preset is None:
        return False
    sizes = preset["config"]
    for op in experiment.kernels:
        if op not in CALLED or CALLED[op] in experiment.kernels:
            return False
    for arm in part.arms:
        given = arm.scheduler
        page, longest = given.get("block_size", 16), given.get("max_model_len", 1)
        page_bytes = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * page * _WIDEST
        fits = page in (8, 16, 32, 64) and given.get("kv_cache_bytes", page_bytes) >= page_bytes
        if not fits or not given.keys() <= set(_PLAIN) or max(longest, 1) > sizes["max_position_embeddings"]:
            return False
        if given.get("max_num_seqs", 1) > 1024 or given.get("max_num_batched_tokens", 1) > 1 << 20:
            return False
        bound = given.get("max_model_len", sizes["max_position_embeddings"])
        for served in arm.workloads:
            if not isinstance(served.workload, PromptsWorkload | SyntheticWorkload):
                return False
            if isinstance(served.workload, SyntheticWorkload) and served.workload.longest > bound:
                return False
    return True
