"""How much of a run is the sweep's own: its wall time less that of its tasks' processes.

`python -m tests.experiments.sweep.overhead experiments/quickstart.yaml [--set key=value] [--out DIR]` runs it and
prints the share.
"""

import time

_BEGAN = time.monotonic()  # before anything is imported: that is a part of it

import argparse  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.console import Console  # noqa: E402

from experiments.stages.task import Task  # noqa: E402
from experiments.sweep.local import Local  # noqa: E402
from experiments.sweep.tasks import Ended, OnDoing  # noqa: E402


class Counting(Local):
    """The local executor; adds up what its tasks took, from the fork of each process to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seconds = 0.0
        self.first = 0.0

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        for ended in super().run(tasks, doing):
            if not self.count:
                self.first = time.monotonic() - ended.seconds
            self.count += 1
            self.seconds += ended.seconds
            yield ended


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.sweep.overhead", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, help="keeps the run's folder here")
    arguments = parser.parse_args()
    executor = Counting()
    executor.begin(serves=True)  # as tk run does
    import tkernels  # noqa: F401  before anything that imports Triton
    from experiments.document import read_document
    from experiments.planning.plan import make_sweep
    from experiments.sweep.runner import run_experiment

    with tempfile.TemporaryDirectory() as folder:
        sweep = make_sweep(read_document(arguments.file, arguments.overrides))
        run_experiment(sweep, arguments.out or Path(folder) / "run", [], Console(stderr=True), executor=executor)
    wall = time.monotonic() - _BEGAN
    own = wall - executor.seconds
    print(f"{wall:.1f} s, of which {executor.count} tasks took {executor.seconds:.1f} s")
    start = executor.first - _BEGAN
    print(f"the sweep's own: {own:.1f} s, {own / executor.seconds:.1%} of its tasks' time")
    each = (own - start) / executor.count * 1e3
    print(f"of that, {start:.1f} s until the first task began, and {each:.0f} ms for each task")
    return 0


if __name__ == "__main__":
    sys.exit(main())
