"""`tk report`: what a recorded run says, as one HTML file in its folder, or as Markdown or JSON on stdout."""

import sys

from experiments.commands.requests import ReportRequest
from experiments.document import ExperimentError
from experiments.reporting.rendering import as_json, as_markdown, write_report
from experiments.reporting.report import report_of
from experiments.runs.reading import read_run
from tsched.torch_free import suggest_name

FORMATS = ("html", "md", "json")


def run(request: ReportRequest) -> int:
    """Writes the report; of `html`, the file's path goes to stdout."""
    form = request.form
    if form not in FORMATS:
        raise ExperimentError([f"--format: no {form!r}: there is {', '.join(FORMATS)}{suggest_name(form, FORMATS)}"])
    recorded = read_run(request.folder)
    for repair in recorded.repairs:
        print(f"note: {repair}", file=sys.stderr)
    report = report_of(recorded)
    if form == "html":
        print(write_report(report, request.folder))
    else:
        print(as_json(report) if form == "json" else as_markdown(report), end="" if form == "md" else "\n")
    return 0
