"""`tk report`: what a recorded run says, as one HTML file in its folder, or as Markdown or JSON on stdout."""

import sys

from experiments.commands.requests import ReportRequest
from experiments.exits import check_name
from experiments.reporting.rendering import as_json, as_markdown, write_report
from experiments.reporting.report import report_of
from experiments.runs.reading import read_run


def run(request: ReportRequest) -> int:
    """Writes the report; of `html`, the file's path goes to stdout."""
    check_name("--format", request.form, ("html", "md", "json"))
    recorded = read_run(request.folder)
    for repair in recorded.repairs:
        print(f"note: {repair}", file=sys.stderr)
    report = report_of(recorded)
    if request.form == "html":
        print(write_report(report, request.folder))
    elif request.form == "json":
        print(as_json(report))
    else:
        print(as_markdown(report), end="")
    return 0
