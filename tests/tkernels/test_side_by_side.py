"""Works side by side: those that hang wait together, and whatever one does to its processes is said of it alone."""

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from tkernels import side_by_side
from tkernels.isolation import Ending, Tell, Work
from tkernels.side_by_side import run_side_by_side


def hang(tell: Tell) -> None:
    time.sleep(60)


def hold(tell: Tell) -> None:
    held = bytearray(2**30)
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(60)


def spawn(tell: Tell) -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    tell("spawned")


def run(*works: Work, **limits: Any) -> tuple[list[Ending], list[tuple[int, Any]]]:
    heard: list[tuple[int, Any]] = []
    endings = run_side_by_side(works, lambda *told: heard.append(told), **{"timeout": 4.0, **limits})
    return endings, heard


def test_works_that_hang_wait_together_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_YOUNG_S", 0.2)
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 1)
    began = time.monotonic()
    endings, heard = run(*[hang] * 8, lambda tell: tell("right"))
    assert time.monotonic() - began < 16.0  # one after the other they take 32 s
    assert [one.death for one in endings] == ["timeout: it took longer than 4 s"] * 8 + [None]
    assert heard == [(8, "right")]


def test_no_more_begin_at_once_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 2)

    def last(tell: Tell) -> None:
        tell(["begins", time.monotonic()])
        time.sleep(0.3)
        tell(["ends", time.monotonic()])

    _, heard = run(*[last] * 6)
    at_once, most = 0, 0
    for _, (what, _) in sorted(heard, key=lambda one: one[1][1]):
        at_once += 1 if what == "begins" else -1
        most = max(most, at_once)
    assert most == 2


def test_each_ending_is_its_own() -> None:
    works: list[Work] = [
        spawn,
        lambda tell: os.kill(os.getppid(), signal.SIGKILL),
        lambda tell: os._exit(3),
        lambda tell: print("x" * 5_000_000),
        lambda tell: tell({"text": "y" * 200_000}),
    ]
    (spawned, orphaned, left, printed, told), heard = run(*works)
    assert (spawned.death, spawned.left) == (None, 1)
    assert orphaned.death is not None
    assert orphaned.death.startswith("killed by SIGKILL")
    assert left.death == "its process left with exit status 3"
    assert (printed.death, len(printed.printed)) == (None, (1 << 16) - 1)
    assert told.death is None
    assert sorted(heard)[0] == (0, "spawned")
    assert dict(heard)[4] == {"text": "y" * 200_000}


def test_one_that_stops_its_keeper_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_GRACE_S", 1.0)
    (stopped, right), _ = run(lambda tell: os.kill(os.getppid(), signal.SIGSTOP), lambda tell: None, timeout=1.0)
    assert stopped.death == "timeout: it took longer than 2 s"
    assert right.death is None


def test_one_that_takes_all_memory_is_ended() -> None:
    (held, right), _ = run(hold, lambda tell: None, timeout=30.0, memory=_resident() + 2**29)
    assert held.death is not None
    assert held.death.startswith("memory: it took more than")
    assert right.death is None


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
