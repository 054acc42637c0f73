"""A process image for tasks: imports torch, Triton and the house once, runs nothing, and forks a child per task.

`python -m experiments.sweep.server PARENT`: a JSON line on stdin says what the run is, and each further line is a task.
The answers go to stdout: a line per message, and {"over": ...} when the child has ended. When stdin ends, because the
one who started it, the process PARENT, is gone, it ends its child with all that it started, and itself.

Whatever a child starts, in whatever session, is this process's own once the child is gone, and is ended before the next
task; where the system is not Linux, only the child's process group is. When this process itself is killed, the kernel
ends its child on Linux, and what that child had started is nobody's, and stays.

A forked child is safe because nothing in here runs an op of torch, whose threads a child would not have, or touches
CUDA. Even to ask whether there is CUDA would break it in every child: the environment says how Triton runs, and for a
GPU each child plans for itself.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from experiments.sweep.tasks import Setup, Task
    from experiments.sweep.work import Planned

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHUNK = 1 << 16
_LAST_WORDS = 300
_CLOSING = b'{"used":'
"""How the last message of a task begins that came to its end, as in experiments.sweep.work."""


def main() -> None:
    """Serves tasks until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal; the starter decides what it means
    _die_with(int(sys.argv[1]), signal.SIGTERM)  # what it imports takes seconds, in which it reads no stdin
    _adopt_orphans()
    woken = _Woken()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    lines = _Lines(0)
    import torch  # noqa: F401  most of the time that it takes to be ready, and the same for every run

    head = lines.wait()
    if head is None:
        return
    # An interpreted kernel's exp overflows to infinity, as a GPU's does, and says so through numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    data = json.loads(head)
    os.environ["TRITON_INTERPRET"] = "1" if data["mode"] == "interpret" else "0"
    import tkernels  # noqa: F401  before anything that imports Triton
    from experiments.sweep.tasks import Setup, Task
    from experiments.sweep.work import plans_of

    setup = Setup.of(data)
    for module in setup.imports:
        importlib.import_module(module)
    planned = None if setup.on_cuda else plans_of(setup)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on stdin tells, and there may be a child to end first
    with contextlib.suppress(BrokenPipeError):  # the starter is gone, and nobody is left to be told
        write_whole(answers, b'{"ready": true}\n')
        while (line := lines.wait()) is not None:
            _serve(Task.of(json.loads(line)), planned, setup, lines, woken, answers)


def write_whole(pipe: int, data: bytes) -> None:
    """A write to a pipe or file may take less than all."""
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


class _Lines:
    """The whole lines of a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.ended = False
        self._begun: list[bytes] = []
        self.whole: deque[bytes] = deque()

    def read(self) -> None:
        """Takes what is there; waits where nothing is."""
        data = os.read(self.pipe, _CHUNK)
        self.ended = not data
        first, *others = data.split(b"\n")
        self._begun.append(first)
        for other in others:
            self.whole.append(b"".join(self._begun))
            self._begun = [other]

    def wait(self) -> bytes | None:
        """The next line; None at the end."""
        while not self.whole and not self.ended:
            self.read()
        return self.whole.popleft() if self.whole else None


@dataclass(frozen=True)
class _Child:
    """A task's process. messages, printed: the pipes that it writes to."""

    pid: int
    messages: int
    printed: int

    def kill(self) -> None:
        """End it with all that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet, or nobody is left in it
            os.kill(self.pid, signal.SIGKILL)


class _Woken:
    """A pipe that gets a byte when a child ends, so that it can be waited for with others."""

    def __init__(self) -> None:
        self.pipe, written = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(written, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(written)

    def drain(self) -> None:
        os.read(self.pipe, _CHUNK)


@dataclass
class _Watch:
    """A child and what is known of it. closed: whether it has sent its last message. status: as waitpid gives it, once
    it has ended.
    """

    child: _Child
    deadline: float
    messages: _Lines
    tail: bytes = b""
    killed: bool = False
    closed: bool = False
    status: int | None = None

    def hear(self, answers: int) -> None:
        """Send on the whole messages that are there."""
        self.messages.read()
        while self.messages.whole:
            message = self.messages.whole.popleft()
            self.closed = message.startswith(_CLOSING)
            write_whole(answers, message + b"\n")

    def listen(self) -> bool:
        """Take in what it printed; whether there may be more."""
        text = os.read(self.child.printed, _CHUNK)
        self.tail = (self.tail + text)[-_CHUNK:]
        return bool(text)

    def drain(self, answers: int) -> None:
        """Whatever a child that has ended left in its pipes; something that it started may hold them open."""
        os.set_blocking(self.child.messages, False)
        os.set_blocking(self.child.printed, False)
        with contextlib.suppress(BlockingIOError):
            while not self.messages.ended:
                self.hear(answers)
        with contextlib.suppress(BlockingIOError):
            while self.listen():
                pass
        os.close(self.child.messages)
        os.close(self.child.printed)

    @property
    def death(self) -> str | None:
        """Why it did not come to its own end."""
        assert self.status is not None
        if self.killed:
            return "timeout"
        if os.WIFSIGNALED(self.status):
            return signal_reason(os.WTERMSIG(self.status))
        code = os.waitstatus_to_exitcode(self.status)
        if code:
            return f"its process left with exit status {code}"
        # Anything may call exit(0), and what was to come is missing.
        return None if self.closed else "its process left with exit status 0 before its end"


def signal_reason(number: int) -> str:
    """What a process's end by a signal means, in a row's words."""
    known = {one.value: one.name for one in signal.Signals}
    name = known.get(number, f"signal {number}")
    memory = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by {name}{memory}"


def _serve(task: "Task", planned: "Planned | None", setup: "Setup", lines: _Lines, woken: _Woken, answers: int) -> None:
    """Has a child do the task; sends on what it says, what it printed, and how it ended. Leaves, with the child, where
    the starter is gone.
    """
    started = time.monotonic()
    child = _fork(task, planned, setup, answers)
    deadline = math.inf if task.timeout is None else started + task.timeout
    watch = _Watch(child, deadline, _Lines(child.messages))
    with selectors.DefaultSelector() as waiting:
        for pipe in (child.messages, child.printed, lines.pipe, woken.pipe):
            waiting.register(pipe, selectors.EVENT_READ)
        try:
            while watch.status is None:
                _wait(watch, waiting, lines, woken, answers)
        except BrokenPipeError:  # it was passing a message on when the starter went
            _end_with(child)
    _end_what_is_left(child)
    watch.drain(answers)
    death = watch.death
    if death == "timeout":
        death = f"timeout: it took longer than {task.timeout:g} s"
    if text := watch.tail.decode(errors="replace").strip():
        write_whole(answers, json.dumps({"printed": text}).encode() + b"\n")
        if death is not None:
            death += f"; last printed: {_last_words(text)}"
    over = {"seconds": time.monotonic() - started, "death": death}
    write_whole(answers, json.dumps({"over": over}).encode() + b"\n")


def _last_words(text: str) -> str:
    """Of what a process printed, the end; of a crash that Python saw coming, where it was."""
    _, crash, stack = text.rpartition("Fatal Python error")
    stack = stack.partition("Extension modules:")[0]
    return " ".join(f"{crash}{stack}".split())[:_LAST_WORDS] if crash else " ".join(text.split())[-_LAST_WORDS:]


def _wait(watch: _Watch, waiting: selectors.BaseSelector, lines: _Lines, woken: _Woken, answers: int) -> None:
    """Until something happens, and what then is to be done."""
    child = watch.child
    left = None if watch.killed or watch.deadline == math.inf else max(0.0, watch.deadline - time.monotonic())
    ready = {key.fd for key, _ in waiting.select(left)}
    if child.messages in ready:
        watch.hear(answers)
        if watch.messages.ended:
            waiting.unregister(child.messages)
    if child.printed in ready and not watch.listen():
        waiting.unregister(child.printed)
    if lines.pipe in ready:
        lines.read()
        if lines.ended:
            _end_with(child)
    if woken.pipe in ready:
        woken.drain()
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        watch.status = status if pid else None
    elif not watch.killed and time.monotonic() >= watch.deadline:
        watch.killed = True
        child.kill()


def _end_with(child: _Child) -> NoReturn:
    """The starter is gone: ends the child with all that it started, and this process."""
    child.kill()
    _end_what_is_left(child)
    os._exit(1)


def _fork(task: "Task", planned: "Planned | None", setup: "Setup", answers: int) -> _Child:
    """A child at work on the task."""
    messages, tell = os.pipe()
    printed, say = os.pipe()
    starter = os.getpid()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.close(say)
        return _Child(pid, messages, printed)
    # Whatever the task leaves behind would hold the answers open when the server is gone, and its starter would wait.
    for pipe in (messages, printed, answers):
        os.close(pipe)
    _work(task, planned, setup, tell, say, starter)


def _work(task: "Task", planned: "Planned | None", setup: "Setup", tell: int, say: int, starter: int) -> NoReturn:
    """The child's whole life."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _die_with(starter, signal.SIGKILL)
        _be_the_first_to_go()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(say, 1)
        os.dup2(say, 2)
        faulthandler.enable(sys.__stderr__ or 2)
        from experiments.sweep.work import carry_out, plans_of

        planned = planned if planned is not None else plans_of(setup)
        carry_out(task, planned, setup, lambda line: write_whole(tell, line.encode() + b"\n"))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not exit(): what runs there is the server's, and a thread that hangs would hold it up.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _adopt_orphans() -> None:
    """Have the kernel make this process the parent of whatever a child of it leaves behind; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_what_is_left(child: _Child) -> None:
    """Ends everything that a child started, which is a child of this process itself by and by; with it the child, where
    that has not ended.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended and not any(_end(pid) for pid in _children()):
                return


def _children() -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            _, _, facts = (process / "stat").read_text(errors="replace").rpartition(")")
            if int(facts.split()[1]) == os.getpid():
                found.append(int(process.name))
    return found


def _end(pid: int) -> bool:
    """Whether it could be killed; it has ended when this returns."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:  # of another user
        return False
    os.waitpid(pid, 0)
    return True


def _die_with(starter: int, number: int) -> None:
    """Have the kernel send this process a signal when its starter is gone, however that came; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != starter:  # it was gone before that
        os._exit(1)


def _be_the_first_to_go() -> None:
    """Where memory runs out, the kernel shall end this task, and not the server or the one that writes the rows."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # no such thing elsewhere
        file.write("1000")


if __name__ == "__main__":
    main()
