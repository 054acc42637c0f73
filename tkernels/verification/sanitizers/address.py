"""Every unmasked lane of every load, store and atomic must fall on an element of a tensor of the launch."""

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.inputs import clone_inputs
from tkernels.variant import Variant
from tkernels.verification.addresses import sanitizing_door
from tkernels.verification.calls import call
from tkernels.verification.sanitizers.base import Sanitizer, without_launches


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    call(variant, clone_inputs(case.inputs), config, door=sanitizing_door)
    return None


SANITIZER = Sanitizer(
    "address",
    "an access outside every tensor of the launch; int32 arithmetic that overflows",
    _run,
    unfit=without_launches,
)
