"""`tk results-table`: the documentation's performance tables, made of the results that lie in the repository."""

from pathlib import Path

from experiments.commands.requests import ResultsTableRequest
from experiments.document import ExperimentError
from experiments.gpu_report.engine_marks import engine_figures
from experiments.gpu_report.figures import mark_rows
from experiments.gpu_report.folder import read_report
from experiments.gpu_report.table import engine_marks_table, marks_table
from experiments.runs.reading import RecordedRun

RESULTS = Path(__file__).parent.parent / "results"

BEGIN = "<!-- made by `tk results-table --update docs/speed.md` -->"
ENGINE_BEGIN = "<!-- engine marks, made by `tk results-table --update docs/speed.md` -->"
END = "<!-- end of the table -->"


def run(request: ResultsTableRequest) -> int:
    """Prints the sections, or writes each between a file's markers for it."""
    update = request.update
    if update is None:
        print(f"{make_section(RESULTS)}\n\n{make_engine_section(RESULTS)}")
        return 0
    update.write_text(updated(update.read_text(encoding="utf-8"), RESULTS, update), encoding="utf-8")
    return 0


def updated(text: str, results: Path, file: Path) -> str:
    """`text` with the tables of `results`; that of the engine only where it has markers."""
    text = replaced(text, make_section(results), file)
    return replaced(text, make_engine_section(results), file, ENGINE_BEGIN) if ENGINE_BEGIN in text else text


def make_section(results: Path) -> str:
    """One table per device that has results, and an empty one where none has."""
    parts = [
        f"{run.environment['device']['name']} (`experiments/results/{run.path.name}`):\n\n"
        f"{marks_table(mark_rows(run.rows))}"
        for run in _reports(results)
    ]
    empty = f"No GPU has run this code yet; the marks are an H200's.\n\n{marks_table(mark_rows(()))}"
    return "\n\n".join(parts) or empty


def make_engine_section(results: Path) -> str:
    """The engine marks of each device that has results; of one where none has, all not measured."""
    parts = [
        f"{run.environment['device']['name']}:\n\n{engine_marks_table(engine_figures(run.rows))}"
        for run in _reports(results)
    ]
    return "\n\n".join(parts) or engine_marks_table(engine_figures(()))


def _reports(results: Path) -> list[RecordedRun]:
    """The GPU reports among the folders of `results`."""
    folders = sorted(path for path in results.iterdir() if path.is_dir())
    return [run for folder in folders if (run := read_report(folder)) is not None]


def replaced(text: str, section: str, file: Path, marker: str = BEGIN) -> str:
    """`text` with what is between the markers replaced; an ExperimentError where they are missing."""
    before, begin, rest = text.partition(marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ExperimentError([f"--update {file}: has no lines {marker} and {END}"])
    return f"{before}{marker}\n\n{section}\n\n{END}{after}"
