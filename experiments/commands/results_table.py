"""`tk results-table`: the README's performance table, made of the results that lie in the repository."""

from pathlib import Path

from experiments.document import ExperimentError
from experiments.gpu_report.figures import Found, rows_of
from experiments.gpu_report.journal import FILE, read_lines
from experiments.gpu_report.table import empty_rows, markdown

RESULTS = Path(__file__).parent.parent / "results"

BEGIN = "<!-- made by `tk results-table --update README.md` -->"
END = "<!-- end of the table -->"


def run(update: Path | None) -> int:
    """Prints the section, or writes it between a file's markers."""
    section = make_section(RESULTS)
    if update is None:
        print(section)
        return 0
    update.write_text(replaced(update.read_text(encoding="utf-8"), section, update), encoding="utf-8")
    return 0


def make_section(results: Path) -> str:
    """One table per device that has results, and an empty one where none has."""
    parts = []
    for path in sorted(results.glob(f"*/{FILE}")):
        lines = read_lines(path)
        name = Found.of(lines).device or path.parent.name
        parts.append(f"{name} (`experiments/results/{path.parent.name}`):\n\n{markdown(rows_of(lines))}")
    if not parts:
        parts.append(f"No GPU has run this code yet; the marks are an H200's.\n\n{markdown(empty_rows())}")
    return "\n\n".join(parts)


def replaced(text: str, section: str, file: Path) -> str:
    """`text` with what is between the markers replaced; an ExperimentError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ExperimentError([f"--update {file}: has no lines {BEGIN} and {END}"])
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"
