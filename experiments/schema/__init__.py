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
    HttpWorkload,
    LateRequests,
    Length,
    Priorities,
    PromptsWorkload,
    RequestsWorkload,
    SyntheticWorkload,
    TraceWorkload,
)

__all__ = [
    "AnyWorkload",
    "Batching",
    "Experiment",
    "HttpWorkload",
    "LateRequests",
    "Length",
    "ModelSource",
    "Priorities",
    "PromptsWorkload",
    "Quantization",
    "RequestsWorkload",
    "SchedulerOptions",
    "SyntheticWorkload",
    "TraceWorkload",
    "VariantChoice",
]
