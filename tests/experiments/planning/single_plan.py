"""The one plan of an experiment whose model and dtype are not swept."""

from experiments.document import Document
from experiments.planning.plan import Plan, make_sweep


def make_plan(document: Document) -> Plan:
    (plan,) = make_sweep(document).plans
    return plan
