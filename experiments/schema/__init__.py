"""What an experiment's YAML may say. Structure only: `plan` checks the names of ops, variants and policies, live."""

from experiments.schema.experiment import (
    Batching,
    Choice,
    Dtype,
    Experiment,
    ModelSource,
    Quantization,
    QuantizationSettings,
    VariantChoice,
    validate,
)
from experiments.schema.scheduler import SchedulerOptions
from experiments.schema.workload import LateRequests, Length, Priorities, PromptsWorkload, SyntheticWorkload, Workload

__all__ = [
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
    "VariantChoice",
    "Workload",
    "validate",
]
