"""`tk compare`: runs, or the arms of one, beside each other, with a verdict for every figure."""

from rich.console import Console
from rich.text import Text

from experiments.commands.output import print_json
from experiments.commands.requests import CompareRequest
from experiments.document import ExperimentError
from experiments.exits import check_name
from experiments.reporting.comparison_tables import print_comparison
from experiments.runs.differences import WHATS
from experiments.runs.reading import read_run
from experiments.runs.verdicts import Comparison, compare_arms, compare_runs


def run(request: CompareRequest) -> int:
    """Compares every further run with the first; of a single one, its arms. Returns 0 whatever the verdicts are.

    Raises:
        ExperimentError: A folder is no run, or may not be compared; what the others say has been printed by then.
    """
    for what in request.across:
        check_name("--across", what, WHATS)
    found, refused = _compare(request)
    if request.as_json and found:
        print_json({"comparisons": [one.as_json() for one in found], "refused": refused})
    elif found:
        console = Console()
        for one in found:
            print_comparison(console, one)
        if len(request.folders) > 1:
            console.print(Text("The smallest effects show between arms of one run: its processes take turns.", "dim"))
    if refused:
        raise ExperimentError(refused)
    return 0


def _compare(request: CompareRequest) -> tuple[list[Comparison], list[str]]:
    """(the comparisons, why others are refused)."""
    first, *others = request.folders
    reference = read_run(first)
    if not others:
        return [compare_arms(reference, request.across)], []
    found: list[Comparison] = []
    refused: list[str] = []
    for other in others:
        try:
            found.append(compare_runs(reference, read_run(other), request.across))
        except ExperimentError as error:
            refused += error.problems
    return found, refused
