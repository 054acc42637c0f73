"""What an experiment's YAML may say: types, and the names that are known without torch."""

from experiments.schema.experiment import (
    Batching,
    Experiment,
    ModelSource,
    Quantization,
    SchedulerOptions,
    VariantChoice,
)
from experiments.schema.workload import (
    AnyWorkload,
    LateRequests,
    Length,
    Priorities,
    PromptsWorkload,
    SyntheticWorkload,
    TraceWorkload,
)

__all__ = [
    "AnyWorkload",
    "Batching",
    "Experiment",
    "LateRequests",
    "Length",
    "ModelSource",
    "Priorities",
    "PromptsWorkload",
    "Quantization",
    "SchedulerOptions",
    "SyntheticWorkload",
    "TraceWorkload",
    "VariantChoice",
]
