"""All sanitizers, in the order in which they are run. A new one is a file that defines SANITIZER, and a line here."""

from tkernels.names import Names
from tkernels.verification.sanitizers import address, batch, guard, order, overflow, poison, race, reuse, tuning
from tkernels.verification.sanitizers.base import Sanitizer

_MODULES = (address, overflow, order, race, batch, poison, reuse, guard, tuning)

SANITIZERS: Names[Sanitizer] = Names("sanitizer", {m.SANITIZER.name: m.SANITIZER for m in _MODULES})
