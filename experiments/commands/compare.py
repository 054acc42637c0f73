"""`tk compare`: runs, or the arms of one, beside each other, with a verdict for every figure."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from experiments.commands.requests import CompareRequest
from experiments.document import ExperimentError
from experiments.reporting.comparison_tables import print_comparison
from experiments.runs.differences import WHATS
from experiments.runs.reading import read_run
from experiments.runs.verdicts import Comparison, compare_arms, compare_runs
from tsched.torch_free import suggest_name


def run(request: CompareRequest) -> int:
    """Compares every further run with the first; of a single one, its arms. Returns 0 whatever the verdicts are.

    Raises:
        ExperimentError: a folder is no run, or may not be compared; what the others say has been printed by then.
    """
    for what in request.across:
        if what not in WHATS:
            there_is = f"there is {', '.join(WHATS)}{suggest_name(what, WHATS)}"
            raise ExperimentError([f"--across {what}: unknown; {there_is}"])
    first, *others = request.folders
    reference = read_run(first)
    found: list[Comparison] = []
    refused: list[str] = []
    for other in others:
        try:
            found.append(compare_runs(reference, read_run(other), request.across))
        except ExperimentError as error:
            refused += error.problems
    if not others:
        found.append(compare_arms(reference, request.across))
    if request.as_json and found:
        print(json.dumps({"comparisons": [one.as_json() for one in found], "refused": refused}, indent=1))
    elif found:
        _print(found, between_runs=bool(others))
    if refused:
        raise ExperimentError(refused)
    return 0


def _print(found: Sequence[Comparison], *, between_runs: bool) -> None:
    console = Console()
    for one in found:
        print_comparison(console, one)
    if between_runs:
        console.print(Text("The smallest effects show between arms of one run: its processes take turns.", "dim"))
