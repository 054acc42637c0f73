"""What the progress display says of the time that is left."""

import io

from rich.console import Console

from experiments.progress import format_clock
from experiments.stages.task import Phase, Task
from experiments.sweep.display import Display, time_left


def task(key: str, phase: Phase = "engine") -> Task:
    return Task(key, phase)


def test_a_task_will_take_what_its_replicates_took_or_else_its_phase_or_else_any() -> None:
    known = {"engine/a": [2.0, 4.0], "phase engine": [2.0, 4.0, 6.0], "all": [1.0, 2.0, 4.0, 6.0, 7.0]}
    assert time_left(known, [task("engine/a#2")]) == 3.0
    assert time_left(known, [task("engine/b#0")]) == 4.0
    assert time_left(known, [task("quantization/dense", "quantization")]) == 4.0
    assert time_left(known, [task("engine/a#2"), task("engine/a#3"), task("engine/b#1")]) == 10.0
    assert time_left(known, []) == 0
    assert time_left({}, [task("engine/a#0")]) is None


def test_a_clock() -> None:
    assert [format_clock(seconds) for seconds in (0.2, 7, 60, 3599.6)] == ["0:00", "0:07", "1:00", "1:00:00"]
    assert format_clock(3723) == "1:02:03"


def test_it_shows_the_task_the_count_and_the_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    tasks = [task(f"engine/a#{number}") for number in range(4)]
    with Display(console) as display:
        display.doing(tasks[0], "answers")
        display.ended(tasks[0], 30.0)
        display.plan(1, tasks[1:])
        display.doing(tasks[1], "2 of 4 rounds")
        display._progress.refresh()
        display.say("engine/a#0: a warning")
        display.plan(4, [])
    shown = out.getvalue()
    for words in ("1/4", "1:30 left", "engine/a#1 2 of 4 rounds", "engine/a#0: a warning", "4/4"):
        assert words in shown
