"""Whatever a process does to itself is told in words, harms no other task, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tkernels.marked_processes import MARK, left_over
from tkernels.isolation import Prepare, Server, ServerError, Tell, Work, describe_exit, run_forked

HERE = "tests.tkernels.test_isolation:prepare"


def _garbage(tell: Tell) -> None:
    os.write(tell._pipe, b"}{ not a message\n[1]\n")


def _sleeper(seconds: float) -> None:
    subprocess.Popen(["sleep", str(seconds)], start_new_session=True)


def _stopped_and_alive(tell: Tell) -> None:
    _sleeper(300)
    if os.fork() == 0:
        time.sleep(300)
    tell("left two behind")


def _raise(error: BaseException) -> None:
    raise error


def _many(tell: Tell) -> None:
    for number in range(1000):
        tell({"number": number, "text": "x" * 300})


def _twice(tell: Tell) -> None:
    copy = os.fork()
    tell("once")
    os.waitpid(copy, 0)


def _copy_goes_on(tell: Tell) -> None:
    if copy := os.fork():
        os.waitpid(copy, 0)
        os._exit(0)


def _patient(tell: Tell) -> None:
    for _ in range(3):
        tell.within(60.0)
        time.sleep(0.3)


def _impatient(tell: Tell) -> None:
    tell.within(0.2)
    time.sleep(60)


WORKS: dict[str, Work] = {
    "tells": lambda tell: tell({"a": [1, None, "é\n"]}),
    "tells much": _many,
    "leaves": lambda tell: (print("on my way", flush=True), os._exit(3))[0],  # type: ignore[func-returns-value]
    "leaves early": lambda tell: os._exit(0),
    "raises": lambda tell: [][0],
    "exits": lambda tell: _raise(SystemExit(0)),
    "interrupts": lambda tell: _raise(KeyboardInterrupt("mine")),
    "is killed": lambda tell: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda tell: __import__("ctypes").string_at(0),
    "hangs": lambda tell: time.sleep(60),
    "closes its pipes": lambda tell: (os.closerange(1, 64), time.sleep(60))[1],
    "hangs beside another": lambda tell: (_sleeper(300), time.sleep(60))[1],
    "ignores signals": lambda tell: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(60))[1],
    "ends its server": lambda tell: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(60))[1],
    "is patient": _patient,
    "is impatient": _impatient,
    "prints": lambda tell: print("one\n" * 100_000, '["ended", {"seconds": 0}]', sep=""),
    "prints bytes": lambda tell: (os.write(1, b"\xff\x00\xfe"), None)[1],
    "writes garbage": _garbage,
    "forks": _twice,
    "goes on as a copy": _copy_goes_on,
    "leaves others": _stopped_and_alive,
    "reads": lambda tell: tell(os.read(0, 100).decode()),
    "says what it has": lambda tell: tell([os.environ.get("MINE"), os.environ.get("LATER"), sys.path]),
}
DEATHS = {
    "leaves": "its process left with exit status 3; last printed: on my way",
    "leaves early": "its process left with exit status 0 before its end",
    "goes on as a copy": "its process left with exit status 0 before its end",
    "is killed": "killed by SIGKILL, as the kernel does when memory runs out",
    "hangs": "timeout: it took longer than 0.5 s",
    "closes its pipes": "timeout: it took longer than 0.5 s",
    "ignores signals": "timeout: it took longer than 0.5 s",
    "is impatient": "timeout: it took longer than 0.2 s",
}


def prepare(about: Any) -> Prepare:
    """In the server."""
    if about == "broken":
        raise ValueError("nothing to prepare")
    count = {"tasks": 0}

    def one(task: str) -> Work:
        count["tasks"] += 1
        if task == "counts":
            so_far = count["tasks"]
            return lambda tell: tell(so_far)
        if task == "cannot be prepared":
            raise ValueError("no such task")
        return WORKS[task]

    return one


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """In the environment of every process that these tests start; none may be left at the end."""
    mark = f"isolation-{os.getpid()}"
    yield mark
    assert left_over(mark, seconds=10.0) == []


@pytest.fixture(scope="module")
def server(mark: str) -> Iterator[Server]:
    server = Server({MARK: mark, "MINE": "1", "OMP_NUM_THREADS": "1"})
    server.load(HERE, environment={"LATER": "2"})
    yield server
    server.end()


@pytest.fixture(params=["server", "fork"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "server":
        started: Server = request.getfixturevalue("server")
        return started.run
    return lambda name, *arguments: run_forked(WORKS[name], *arguments)


def test_messages_arrive_in_order_and_whole(run: Callable[..., Any]) -> None:
    heard: list[Any] = []
    ending = run("tells", heard.append)
    assert heard == [{"a": [1, None, "é\n"]}]
    assert (ending.death, ending.signal, ending.timed_out, ending.printed) == (None, 0, False, "")
    heard.clear()
    assert run("tells much", heard.append).death is None
    assert [one["number"] for one in heard] == list(range(1000))


def test_a_copy_of_a_child_says_nothing(run: Callable[..., Any]) -> None:
    heard: list[Any] = []
    assert run("forks", heard.append).death is None
    assert heard == ["once"]


@pytest.mark.parametrize("name", DEATHS)
def test_whatever_ends_a_process_is_told(run: Callable[..., Any], name: str) -> None:
    times_out = "timeout" in DEATHS[name]
    ending = run(name, lambda message: None, 0.5 if times_out else 4.0)  # a busy machine is slow to end a process
    assert ending.death == DEATHS[name]
    assert ending.timed_out == times_out
    assert ending.signal == (signal.SIGKILL if name == "is killed" or ending.timed_out else 0)
    assert ending.seconds < 5.0


def test_a_crash_and_an_exception_say_where(run: Callable[..., Any]) -> None:
    crash = run("crashes", lambda message: None)
    assert crash.signal == signal.SIGSEGV
    assert crash.death.startswith("killed by SIGSEGV; last printed: Fatal Python error: Segmentation fault")
    assert "string_at" in crash.death
    raised = run("raises", lambda message: None)
    assert raised.death.startswith("its process left with exit status 1; last printed: ")
    assert raised.death.endswith("IndexError: list index out of range")


@pytest.mark.parametrize(("name", "error"), [("exits", "SystemExit: 0"), ("interrupts", "KeyboardInterrupt: mine")])
def test_what_no_task_should_raise_is_named(run: Callable[..., Any], name: str, error: str) -> None:
    death = run(name, lambda message: None).death
    assert death.startswith(f"it raised {error}; last printed: ")
    assert "_raise" in death


def test_seconds_may_be_given_anew(run: Callable[..., Any]) -> None:
    assert run("is patient", lambda message: None, 0.5).death is None


def test_what_is_printed_is_kept_apart_and_only_its_end(run: Callable[..., Any]) -> None:
    heard: list[Any] = []
    ending = run("prints", heard.append)
    assert (heard, ending.death) == ([], None)
    assert ending.printed.endswith('one\n["ended", {"seconds": 0}]')
    assert 60_000 < len(ending.printed) <= 1 << 16
    assert run("prints bytes", heard.append).printed == "�\x00�"


def test_what_is_no_message_is_told(run: Callable[..., Any]) -> None:
    heard: list[Any] = []
    ending = run("writes garbage", heard.append)
    assert heard == []
    assert ending.death == "its process sent what is no message: '}{ not a message'"


def test_there_is_nothing_to_read(run: Callable[..., Any]) -> None:
    heard: list[Any] = []
    assert run("reads", heard.append).death is None
    assert heard == [""]


def test_what_a_task_started_is_ended_whatever_its_session(server: Server, mark: str) -> None:
    heard: list[Any] = []
    before = left_over(mark, seconds=0.0)
    ending = server.run("leaves others", heard.append)
    assert (ending.death, ending.left) == (None, 2)
    assert heard == ["left two behind"]
    assert left_over(mark, seconds=0.0) == before


def test_a_server_keeps_what_it_prepares_and_outlives_its_tasks(server: Server) -> None:
    heard: list[Any] = []
    server.run("counts", heard.append)
    server.run("crashes", heard.append)
    ending = server.run("cannot be prepared", heard.append)
    assert ending.death.endswith("ValueError: no such task")
    server.run("counts", heard.append)
    first, second = heard
    assert second == first + 3


def test_a_server_is_told_its_environment_and_finds_what_its_starter_does(server: Server) -> None:
    heard: list[Any] = []
    server.run("says what it has", heard.append)
    assert heard == [["1", "2", sys.path]]


def test_a_server_that_cannot_load_or_dies_says_so(mark: str) -> None:
    broken = Server({MARK: mark})
    broken.load(HERE, about="broken")
    with pytest.raises(ServerError, match="^did not start: exit status 1$"):
        broken.wait()
    broken.end()
    dying = Server({MARK: mark})
    dying.load(HERE)
    dying.wait()
    heard: list[Any] = []
    with pytest.raises(ServerError, match="^ended: killed by SIGKILL"):
        dying.run("ends its server", heard.append)
    assert dying.is_dead
    dying.end()


def test_a_killed_starter_leaves_nothing(mark: str) -> None:
    code = f"""
import time
from tkernels.isolation import Server
server = Server()
server.load({HERE!r})
server.wait()
print("begun", flush=True)
server.run("leaves others", lambda message: print(message, flush=True))
server.run("hangs", print)
"""
    environment = {**os.environ, MARK: f"{mark}-killed"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "begun\n"
        assert starter.stdout.readline() == "left two behind\n"
        assert len(left_over(f"{mark}-killed", seconds=0.0)) >= 2
        starter.kill()
    assert left_over(f"{mark}-killed", seconds=10.0) == []


def test_a_server_whose_starter_no_longer_listens_ends_with_its_task_and_says_nothing(mark: str) -> None:
    with Server({MARK: f"{mark}-deaf"}) as server:
        server.load(HERE)
        server.wait()
        server._answers.close()
        server._order(["tells much", None])
        assert server._process.wait(timeout=60) == 1
    assert left_over(f"{mark}-deaf", seconds=10.0) == []


def test_a_server_that_is_ended_at_work_ends_with_all_that_it_started(mark: str) -> None:
    with Server({MARK: f"{mark}-ended"}) as server:
        server.load(HERE)
        server.run("tells", lambda message: None)
        server._order(["hangs beside another", None])
        deadline = time.monotonic() + 30
        while len(left_over(f"{mark}-ended", seconds=0.0)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(left_over(f"{mark}-ended", seconds=0.0)) == 3  # the server, its task, what that started
    assert server.is_dead
    assert left_over(f"{mark}-ended", seconds=0.0) == []


def test_what_a_signal_means() -> None:
    assert describe_exit(-signal.SIGABRT) == "killed by SIGABRT"
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert describe_exit(-99) == "killed by signal 99"
    assert describe_exit(3) == "exit status 3"
