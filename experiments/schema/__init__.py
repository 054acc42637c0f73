"""What an experiment's YAML may say: types, and the names that are known without torch."""

from experiments.schema.experiment import (
    Batching,
    Choice,
    Experiment,
    ModelSource,
    Quantization,
    QuantizationSettings,
    VariantChoice,
)
from experiments.schema.scheduler import SchedulerOptions
from experiments.schema.workload import (
    AnyWorkload,
    LateRequests,
    Length,
    Priorities,
    PromptsWorkload,
    SyntheticWorkload,
    TraceWorkload,
    Workload,
)

__all__ = [
    "AnyWorkload",
    "Batching",
    "Choice",
    "Experiment",
    "LateRequests",
    "Length",
    "ModelSource",
    "Priorities",
    "PromptsWorkload",
    "Quantization",
    "QuantizationSettings",
    "SchedulerOptions",
    "SyntheticWorkload",
    "TraceWorkload",
    "VariantChoice",
    "Workload",
]
