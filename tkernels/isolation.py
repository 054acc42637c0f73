"""One way to run something in a process of its own: a crash, a hang or an exit harms that process alone, and is told.

`Server` is a process that imports torch, Triton and the house once, and forks a child for each task. `run_forked` forks
the calling process itself. Either way the child has a process group of its own, nothing on stdin, and dies with its
starter; its messages come over a pipe, its output is kept apart, and an `Ending` says how it ended. Whatever a server's
child started, in whatever session, becomes the server's child and is ended before the next task; after `run_forked`
only the process group is. When a server itself is killed, the kernel ends its child; what that had started stays.

Forking is safe because a server runs no op of torch on several threads, which a child would not have, and does not
touch CUDA. Even to ask whether there is CUDA would break it in every child: the environment says how Triton runs.

This file is also the program of a server, and needs nothing but Python on Linux, the system that Triton is made for.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tkernels.errors import TKernelsError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PIPE_BYTES = 1 << 20
"""No pipe holds more."""
_KEPT_BYTES, _LAST_WORDS = 1 << 16, 300
"""Of a child's output, what is kept, and the characters of it that a reason has."""
_POLL_S, _SOON_S = 0.05, 0.001
"""How often a child is asked whether it has ended: while its messages' pipe is open, and after."""


class ServerError(TKernelsError, RuntimeError):
    """A server did not start, or has ended; the message says how."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. death: why it did not come to its own end, None where it did.

    seconds: from its start to its end. signal: what killed it, 0 where nothing did. printed: the end of its output.
    left: processes that it had started and a server had to end after it.
    """

    seconds: float
    death: str | None = None
    timed_out: bool = False
    signal: int = 0
    printed: str = ""
    left: int = 0


class Tell:
    """A child's way to its starter. A message is any value that JSON can hold; it is sent at once.

    A copy of the child, which foreign code made with os.fork, ends where it would send something: it would say all that
    the child says again.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe, self._child = pipe, os.getpid()

    def __call__(self, message: Any) -> None:
        self._send("message", message)

    def within(self, seconds: float) -> None:
        """From now on the child has so many seconds, whatever its time-out was."""
        self._send("within", seconds)

    def done(self) -> None:
        """The child has come to its end."""
        self._send("done", None)

    def raised(self, error: BaseException) -> None:
        """The child ends by what is no Exception: its code called sys.exit, or raised KeyboardInterrupt itself."""
        self._send("raised", f"{type(error).__name__}: {error}")

    def leave(self) -> None:
        """In a copy that the child made itself: it lets the pipe go, which is the child's."""
        os.close(self._pipe)

    def _send(self, kind: str, value: Any) -> None:
        if os.getpid() != self._child:
            os._exit(1)
        _send(self._pipe, kind, value)


Work = Callable[[Tell], None]
"""What a child does."""

Prepare = Callable[[Any], Work]
"""Makes a task's work, in the server: what it keeps is there for the children of later tasks."""

OnMessage = Callable[[Any], None]


class Server(contextlib.AbstractContextManager["Server"]):
    """A process that forks a child for each task, one at a time. It ends with the thread that made it, or before."""

    def __init__(self, environment: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> None:
        """Starts the process, which imports torch and then waits for `load`.

        Args:
            environment: Variables beside this process's own.
            imports: Modules that the tasks will want. They are imported at once where the environment, or a torch that
                knows no GPU, has decided how Triton runs.
        """
        # -P: the files beside this one are no modules. A session of its own: Ctrl-C is for the one that starts it.
        command = (sys.executable, "-P", __file__, str(os.getpid()), json.dumps(sys.path), *imports)
        variables, pipe = {**os.environ, **(environment or {})}, subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=variables)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._is_ready = False

    def load(self, prepare: str, about: Any = None, environment: Mapping[str, str] | None = None) -> None:
        """Says what its tasks are; it then imports and takes them.

        Args:
            prepare: "module:function", called once in the server with `about`; it returns a `Prepare`.
            environment: Variables that are set before anything but torch is imported.
        """
        self._order([prepare, about, dict(environment or {})])

    def wait(self) -> None:
        """Waits until it can take a task. Raises ServerError where it never will."""
        if not self._is_ready and not self._answers.readline():
            raise ServerError(f"did not start: {describe_exit(self._process.wait())}")
        self._is_ready = True

    def run(self, task: Any, on_message: OnMessage, timeout: float | None = None) -> Ending:
        """Runs one task to its end, for `timeout` seconds at most. Raises ServerError where the server itself ended."""
        self.wait()
        self._order([task, timeout])
        for line in self._answers:
            kind, value = json.loads(line)
            if kind == "ended":
                return Ending(**value)
            on_message(value)
        raise ServerError(f"ended: {describe_exit(self._process.wait())}")

    def _order(self, order: list[Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its answers tell
            write_whole(self._orders.fileno(), json.dumps(order).encode() + b"\n")

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it, the child that it may have, and all that this has started."""
        self._process.terminate()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._orders.close()
        self._answers.close()

    def __exit__(self, *_: object) -> None:
        self.end()


def run_forked(work: Work, on_message: OnMessage, timeout: float | None = None, memory: float = math.inf) -> Ending:
    """Runs `work` in a fork of this process; it must not touch CUDA there, nor use threads that were there before.

    Args:
        timeout: Seconds that it has.
        memory: Bytes that it may hold, counted with what it shares with this process.
    """
    child = Child(work, on_message, timeout, memory)
    try:
        while child.goes_on(_POLL_S):
            pass
    finally:
        child.kill()
    return child.ending()


def describe_exit(status: int) -> str:
    """A process's exit status, or the signal that ended it as a negative number, in words."""
    if status >= 0:
        return f"exit status {status}"
    known = {one.value: one.name for one in signal.Signals}
    memory = ", as the kernel does when memory runs out" if status == -signal.SIGKILL else ""
    return f"killed by {known.get(-status, f'signal {-status}')}{memory}"


def write_whole(pipe: int, data: bytes) -> None:
    """Writes all of it, where one write to a pipe or file may take less."""
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def _send(pipe: int, kind: str, value: Any) -> None:
    write_whole(pipe, json.dumps([kind, value]).encode() + b"\n")


def _read(pipe: int) -> bytes:
    """What is in the pipe; nothing also where it has ended."""
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, _PIPE_BYTES)
    return b""


class Child:
    """A fork of this process at a task, as `run_forked` has it, and what is known of it.

    status: as waitpid gives it, once it has ended.
    """

    def __init__(self, work: Work, on_message: OnMessage, timeout: float | None, memory: float = math.inf) -> None:
        self.began, self.on_message, self.memory = time.monotonic(), on_message, memory
        self.give(math.inf if timeout is None else timeout)
        self.unfinished, self.printed, self.garbage, self.raised = bytearray(), b"", "", ""
        self.timed_out = self.took_memory = self.is_done = False
        self.status: int | None = None
        (self.messages, sending), (self.output, printing), starter = os.pipe(), os.pipe(), os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.messages)
            os.close(self.output)
            _live(work, sending, printing, starter)
        os.close(sending)
        os.close(printing)
        self.pipes = selectors.DefaultSelector()
        for pipe, take in ((self.messages, self.hear), (self.output, self.listen)):
            os.set_blocking(pipe, False)
            self.pipes.register(pipe, selectors.EVENT_READ, take)

    def give(self, seconds: float) -> None:
        """It has so many seconds from now on."""
        self.limit, self.deadline = seconds, time.monotonic() + seconds

    def goes_on(self, pause: float) -> bool:
        """Takes in what it sends and prints, or waits `pause` seconds for it; ends it after its time-out.

        Returns:
            Whether it has not ended.
        """
        if self.messages not in self.pipes.get_map():  # ended with it, unless something that it forked holds it open
            pause = min(pause, _SOON_S)
        for key, _ in self.pipes.select(max(0.0, min(pause, self.deadline - time.monotonic()))):
            if not key.data():
                self.pipes.unregister(key.fileobj)
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self.status = status
            return False
        self.timed_out = time.monotonic() >= self.deadline
        self.took_memory = self.memory < math.inf and _resident_bytes(self.pid) > self.memory
        if self.timed_out or self.took_memory:
            self.kill()
        return self.status is None

    def hear(self) -> bool:
        """Takes in the messages that are there; returns whether anything was."""
        data = _read(self.messages)
        self.unfinished += data
        *lines, self.unfinished = self.unfinished.split(b"\n") if b"\n" in data else [self.unfinished]
        for line in lines:
            match _parsed(line):
                case ["message", value]:
                    self.on_message(value)
                case ["within", float() | int() as seconds]:
                    self.give(seconds)
                case ["done", _]:
                    self.is_done = True
                case ["raised", str() as error]:
                    self.raised = error
                case _:  # something else in the process has written into the pipe
                    self.garbage = self.garbage or line.decode(errors="replace")[:_LAST_WORDS]
        return bool(data)

    def listen(self) -> bool:
        """Takes in what it printed, and keeps the end; returns whether anything was there."""
        text = _read(self.output)
        self.printed = (self.printed + text)[-_KEPT_BYTES:]
        return bool(text)

    def kill(self) -> None:
        """Ends it, with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left there, or it is not made yet
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)

    def ending(self) -> Ending:
        """How it ended, once it has, and after its last messages; what it started may still hold the pipes open."""
        self.hear()
        self.listen()
        self.pipes.close()
        os.close(self.messages)
        os.close(self.output)
        assert self.status is not None
        code, printed = os.waitstatus_to_exitcode(self.status), self.printed.decode(errors="replace").strip()
        death = None
        if self.timed_out:
            death = f"timeout: it took longer than {self.limit:g} s"
        elif self.took_memory:
            death = f"memory: it took more than {self.memory / 2**30:.1f} GiB"
        elif code < 0:
            death = describe_exit(code)
        elif self.raised:
            death = f"it raised {self.raised}"
        elif code or not self.is_done:  # anything may call exit(0), and what was to come is missing
            death = f"its process left with {describe_exit(code)}{'' if code else ' before its end'}"
        elif self.garbage:
            death = f"its process sent what is no message: {self.garbage!r}"
        if death is not None and printed:
            death += f"; last printed: {_last_words(printed)}"
        return Ending(time.monotonic() - self.began, death, self.timed_out, max(0, -code), printed)


def free_memory() -> int:
    """Bytes of this machine that a process could still take."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 where it has just ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _parsed(line: bytearray) -> Any:
    """A line of JSON; None where it is none."""
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None


def _last_words(text: str) -> str:
    """Of what a process printed, the end; of a crash that Python saw coming, where it was."""
    _, crash, stack = text.rpartition("Fatal Python error")
    stack = stack.partition("Extension modules:")[0]
    return " ".join(f"{crash}{stack}".split())[:_LAST_WORDS] if crash else " ".join(text.split())[-_LAST_WORDS:]


def _live(work: Work, sending: int, printing: int, starter: int) -> NoReturn:
    """A child's whole life."""
    status, tell = 1, Tell(sending)
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with(starter, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, Linux ends this child and not its starter
        for target, pipe in enumerate((os.open(os.devnull, os.O_RDONLY), printing, printing)):
            os.dup2(pipe, target)
        # Anew: what its starter has printed, and not yet written, is the starter's to write.
        sys.stdout, sys.stderr = (os.fdopen(target, "w", closefd=False) for target in (1, 2))
        faulthandler.enable(2)
        work(tell)
        tell.done()
        status = 0
    except BaseException as error:
        traceback.print_exc()
        if not isinstance(error, Exception):
            tell.raised(error)
    finally:
        # Not exit(): what runs there is the starter's, and a thread that hangs would hold it up.
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def die_with(starter: int, number: int) -> None:
    """Has the kernel send this process a signal when its starter is gone, however that came."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != starter:  # it was gone before that
        os._exit(1)


def adopt_orphans() -> None:
    """What a child leaves behind is from now on this process's, for `end_children`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def serve(starter: int, imports: Sequence[str]) -> None:
    """The life of a server: its orders come on stdin, a line each, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal; the starter decides what it means
    die_with(starter, signal.SIGTERM)
    adopt_orphans()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    import torch  # half of the time that it takes to be ready

    modules = ("tkernels", *imports)  # in this order: tkernels before anything that imports Triton
    if "TRITON_INTERPRET" in os.environ or (torch.version.cuda is None and torch.version.hip is None):
        for module in modules:
            importlib.import_module(module)
    if not (order := sys.stdin.buffer.readline()):
        return
    name, about, environment = json.loads(order)
    os.environ.update(environment)
    for module in modules:
        importlib.import_module(module)
    prepare: Prepare = pkgutil.resolve_name(name)(about)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    try:
        write_whole(answers, b"ready\n")
        for order in sys.stdin.buffer:
            task, timeout = json.loads(order)
            ending = _carry_out(prepare, task, timeout, answers)
            _send(answers, "ended", {**asdict(ending), "left": end_children()})
    except BrokenPipeError:  # the starter no longer listens
        _leave()


def _carry_out(prepare: Prepare, task: Any, timeout: float | None, answers: int) -> Ending:
    """Has a child do the task, and hands on its messages."""
    try:
        work = prepare(task)
    except Exception:
        return Ending(0.0, f"cannot be prepared: {_last_words(traceback.format_exc())}")

    def work_alone(tell: Tell) -> None:
        os.close(answers)  # what the child leaves behind would hold it open
        work(tell)

    return run_forked(work_alone, lambda message: _send(answers, "message", message), timeout)


def _leave() -> NoReturn:
    """Ends a server and all that it has started."""
    end_children()
    os._exit(1)


def end_children() -> int:
    """Ends this process's children, and then those whose parents these were, which are its own by then.

    Returns:
        How many were killed, here or with a child's process group; others had come to their own end.
    """
    killed = 0
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            killed += bool(ended) and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if not ended and not sum(map(_kill, _children())):
                break
            if not ended:
                time.sleep(_SOON_S)
    return killed


def _kill(pid: int) -> bool:
    """Whether it could be killed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:  # of another user
        return False
    return True


def _children() -> Iterator[int]:
    """The processes whose parent is this one."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            _, _, facts = file.read_text(errors="replace").rpartition(")")
            if int(facts.split()[1]) == os.getpid():
                yield int(file.parent.name)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])  # what its starter finds, it finds
    serve(int(sys.argv[1]), sys.argv[3:])
