"""What an experiment's YAML may say. Structure only: `plan` checks the names of ops, variants and policies, live."""

from experiments.schema.experiment import (
    Batching,
    Choice,
    Dtype,
    Experiment,
    ModelSource,
    Quantization,
    QuantizationSettings,
    Validated,
    VariantChoice,
    fit_problems,
    validate,
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
    "Dtype",
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
    "Validated",
    "VariantChoice",
    "Workload",
    "fit_problems",
    "validate",
]
