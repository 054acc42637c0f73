"""One way to run something in a process of its own: a crash, a hang or an exit harms that process alone, and is told.

`Server` is a process image: it imports torch, Triton and the house once, and forks a child for each task. `run_forked`
forks the calling process itself. Either way the child has a process group of its own, nothing on stdin, and dies with
its starter; its messages come over a pipe, its output is kept apart, and an `Ending` says how it ended. Whatever a
server's child started, in whatever session, becomes the server's child and is ended before the next task; elsewhere
than on Linux, and after `run_forked`, only the process group is. When a server itself is killed, the kernel ends its
child on Linux; what that child had started stays.

Forking is safe because a server runs no op of torch on several threads, which a child would not have, and does not
touch CUDA. Even to ask whether there is CUDA would break it in every child: the environment says how Triton runs.

This file is also the program of a server, and needs nothing but Python.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHUNK = 1 << 16
_LAST_WORDS = 300
_POLL_S = 0.02
"""How often a child is asked whether it has ended, where the system has no pidfd."""


class ServerError(RuntimeError):
    """A server did not start, or has ended; the message says how."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. death: why it did not come to its own end, None where it did.

    seconds: from its start to its end. signal: what killed it, 0 where nothing did. printed: the end of its output.
    """

    seconds: float
    death: str | None = None
    timed_out: bool = False
    signal: int = 0
    printed: str = ""


class Tell:
    """A child's way to its starter. A message is any value that JSON can hold; it is sent at once."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __call__(self, message: Any) -> None:
        _send(self._pipe, "message", message)

    def within(self, seconds: float) -> None:
        """From now on the child has so many seconds, whatever its time-out was."""
        _send(self._pipe, "within", seconds)

    def done(self) -> None:
        """The work is done. A child that exits without this did not come to its own end."""
        _send(self._pipe, "done", None)


Work = Callable[[Tell], None]
"""What a child does."""

Prepare = Callable[[Any], Work]
"""Makes a task's work, in the server: what it keeps is there for the children of later tasks."""

OnMessage = Callable[[Any], None]


class Server:
    """A process that forks a child for each task, one at a time. It ends when this object's pipe to it closes, or the
    thread that made it ends.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        begun: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Starts it as `start_server` does; or takes what that began."""
        self._process = begun if begun is not None else start_server(environment, imports)
        self._is_ready = False

    @property
    def _answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def load(self, prepare: str, about: Any = None, environment: Mapping[str, str] | None = None) -> None:
        """Says what its tasks are; it then imports and takes them.

        Args:
            prepare: "module:function", called once in the server with `about`; it returns a `Prepare`.
            environment: variables that are set before anything but torch is imported.
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
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its answers tell
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def end(self, patience: float = 1.0) -> None:
        """Ends it and the child that it may have, after so many seconds by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:  # it still imports; a child of it dies with it
            self._process.kill()
            self._process.wait()
        self._answers.close()


def start_server(
    environment: Mapping[str, str] | None = None, imports: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    """Starts the process of a server, which imports torch and then waits to be told what its tasks are.

    Args:
        environment: variables beside this process's own.
        imports: modules that the tasks will want. They are imported at once where the environment, or a torch that
            knows no GPU, has decided how Triton runs.
    """
    # A session of its own: Ctrl-C is for the one that starts it. -P: the files beside this one are no modules.
    command = (sys.executable, "-P", __file__, str(os.getpid()), json.dumps(sys.path), *imports)
    variables, pipe = {**os.environ, **(environment or {})}, subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=variables)


def run_forked(work: Work, on_message: OnMessage, timeout: float | None = None) -> Ending:
    """Runs `work` in a fork of this process; it must not touch CUDA there, nor use threads that were there before."""
    child = _fork(work, timeout, ())
    try:
        _watch(child, on_message, None)
    finally:
        child.kill()
    return child.ending(on_message)


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


@dataclass
class _Lines:
    """The whole lines of a pipe."""

    pipe: int
    ended: bool = False
    _rest: bytearray = field(default_factory=bytearray)

    def read(self) -> list[bytes]:
        """Those that are there now; waits where nothing is."""
        data = os.read(self.pipe, _CHUNK)
        self.ended = not data
        if b"\n" not in data:
            self._rest += data
            return []
        *whole, rest = bytes(self._rest + data).split(b"\n")
        self._rest = bytearray(rest)
        return whole

    def __iter__(self) -> Iterator[bytes]:
        while not self.ended:
            yield from self.read()


@dataclass
class _Child:
    """A task's process and what is known of it. exit: a pidfd of it, -1 where there is no such thing.

    limit: the seconds that it was given last. done: whether it said so. status: as waitpid gives it, at its end.
    """

    pid: int
    exit: int
    messages: _Lines
    output: int
    began: float
    deadline: float = math.inf
    limit: float = math.inf
    printed: bytes = b""
    garbage: str = ""
    timed_out: bool = False
    done: bool = False
    status: int | None = None

    def give(self, seconds: float) -> None:
        """It has so many seconds from now on."""
        self.limit, self.deadline = seconds, time.monotonic() + seconds

    def hear(self, on_message: OnMessage) -> None:
        """Takes in the messages that are there."""
        for line in self.messages.read():
            try:
                kind, value = json.loads(line)
            except (ValueError, TypeError):
                kind, value = "", None
            if kind == "message":
                on_message(value)
            elif kind == "within":
                self.give(value)
            elif kind == "done":
                self.done = True
            else:  # something else in the process has written into the pipe
                self.garbage = self.garbage or line.decode(errors="replace")[:_LAST_WORDS]

    def listen(self) -> bool:
        """Takes in what it printed, and keeps the end; returns whether there may be more."""
        text = os.read(self.output, _CHUNK)
        self.printed = (self.printed + text)[-_CHUNK:]
        return bool(text)

    def reap(self, options: int = os.WNOHANG) -> None:
        """Notes its status where it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, options)
            self.status = status if pid else None

    def kill(self) -> None:
        """Ends it, with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left there, or it is not made yet
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap(0)

    def ending(self, on_message: OnMessage) -> Ending:
        """How it ended, once it has, and after its last messages; something that it started may hold the pipes open."""
        os.set_blocking(self.messages.pipe, False)
        os.set_blocking(self.output, False)
        with contextlib.suppress(BlockingIOError):
            while not self.messages.ended:
                self.hear(on_message)
        with contextlib.suppress(BlockingIOError):
            while self.listen():
                pass
        for pipe in (self.messages.pipe, self.output, self.exit):
            if pipe >= 0:
                os.close(pipe)
        assert self.status is not None
        code, printed = os.waitstatus_to_exitcode(self.status), self.printed.decode(errors="replace").strip()
        death = self._death(code)
        if death is not None and printed:
            death += f"; last printed: {_last_words(printed)}"
        return Ending(time.monotonic() - self.began, death, self.timed_out, max(0, -code), printed)

    def _death(self, code: int) -> str | None:
        if self.timed_out:
            return f"timeout: it took longer than {self.limit:g} s"
        if code < 0:
            return describe_exit(code)
        if code or not self.done:  # anything may call exit(0), and what was to come is missing
            return f"its process left with {describe_exit(code)}{'' if code else ' before its end'}"
        return f"its process sent what is no message: {self.garbage!r}" if self.garbage else None


def _last_words(text: str) -> str:
    """Of what a process printed, the end; of a crash that Python saw coming, where it was."""
    _, crash, stack = text.rpartition("Fatal Python error")
    stack = stack.partition("Extension modules:")[0]
    return " ".join(f"{crash}{stack}".split())[:_LAST_WORDS] if crash else " ".join(text.split())[-_LAST_WORDS:]


def _fork(work: Work, timeout: float | None, private: tuple[int, ...]) -> _Child:
    """A child at work. private: pipes that are not for it: what it leaves behind would hold them open."""
    (messages, sending), (output, printing), starter = os.pipe(), os.pipe(), os.getpid()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        for pipe in (messages, output, *private):
            os.close(pipe)
        _live(work, sending, printing, starter)
    os.close(sending)
    os.close(printing)
    child = _Child(pid, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1, _Lines(messages), output, began)
    if timeout is not None:
        child.give(timeout)
    return child


def _live(work: Work, sending: int, printing: int, starter: int) -> NoReturn:
    """A child's whole life."""
    status = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _die_with(starter, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, Linux ends this child and not its starter
        for target, pipe in enumerate((os.open(os.devnull, os.O_RDONLY), printing, printing)):
            os.dup2(pipe, target)
        # Anew: what its starter has printed, and not yet written, is the starter's to write.
        sys.stdout, sys.stderr = (os.fdopen(target, "w", closefd=False) for target in (1, 2))
        faulthandler.enable(2)
        tell = Tell(sending)
        work(tell)
        tell.done()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not exit(): what runs there is the starter's, and a thread that hangs would hold it up.
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _watch(child: _Child, on_message: OnMessage, orders: _Lines | None) -> None:
    """Waits until the child has ended, by itself or by its time-out. Raises EOFError where `orders` end before."""
    pipes = {child.messages.pipe, child.output, child.exit, orders.pipe if orders is not None else -1} - {-1}
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while child.status is None:
            left = max(0.0, child.deadline - time.monotonic()) if child.exit >= 0 else _POLL_S
            ready = {key.fd for key, _ in waiting.select(left if left < math.inf else None)}
            if child.messages.pipe in ready:
                child.hear(on_message)
                if child.messages.ended:
                    waiting.unregister(child.messages.pipe)
            if child.output in ready and not child.listen():
                waiting.unregister(child.output)
            if orders is not None and orders.pipe in ready:
                orders.read()
                if orders.ended:
                    raise EOFError
            child.reap()
            if child.status is None and time.monotonic() >= child.deadline:
                child.timed_out = True
                child.kill()


def _import(*modules: str) -> Any:
    """Imports them in order, tkernels before anything that imports Triton; returns the last."""
    return [importlib.import_module(module) for module in modules][-1]


def serve(starter: int, imports: Sequence[str]) -> None:
    """The life of a server: its orders come on stdin, a line each, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal; the starter decides what it means
    _die_with(starter, signal.SIGTERM)  # what it imports takes seconds, in which it reads no stdin
    if sys.platform == "linux":  # what a child leaves behind shall be this process's
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    answers, orders = os.dup(1), _Lines(0)
    os.dup2(2, 1)  # whatever a library prints is no answer
    import torch  # half of the time that it takes to be ready

    if "TRITON_INTERPRET" in os.environ or (torch.version.cuda is None and torch.version.hip is None):
        _import("tkernels", *imports)
    prepare: Prepare | None = None
    with contextlib.suppress(BrokenPipeError):  # the starter is gone, and nobody is left to be told
        for line in orders:
            order = json.loads(line)
            if prepare is not None:
                task, timeout = order
                _serve_task(prepare, task, timeout, orders, answers)
                continue
            name, about, environment = order
            os.environ.update(environment)
            module, _, function = name.partition(":")
            prepare = getattr(_import("tkernels", *imports, module), function)(about)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stdin tells now, and there may be a child to end first
            write_whole(answers, b"ready\n")


def _serve_task(prepare: Prepare, task: Any, timeout: float | None, orders: _Lines, answers: int) -> None:
    """Has a child do the task, hands on its messages and tells how it ended. Leaves where the starter is gone."""
    try:
        work = prepare(task)
    except Exception as error:
        work = _raising(error)
    child = _fork(work, timeout, (answers,))

    def forward(message: Any) -> None:
        _send(answers, "message", message)

    try:
        _watch(child, forward, orders)
    except (EOFError, BrokenPipeError):
        _end_with_all_it_started(child)
        os._exit(1)
    _end_with_all_it_started(child)
    _send(answers, "ended", asdict(child.ending(forward)))


def _raising(error: Exception) -> Work:
    def work(tell: Tell) -> None:
        raise error

    return work


def _end_with_all_it_started(child: _Child) -> None:
    """Ends a server's child, and then the server's other children, which are what it started, until there are none."""
    child.kill()
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended and not any(_end(pid) for pid in _children()):
                return


def _end(pid: int) -> bool:
    """Whether it could be killed; it has ended when this returns."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:  # of another user
        return False
    os.waitpid(pid, 0)
    return True


def _children() -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            _, _, facts = (process / "stat").read_text(errors="replace").rpartition(")")
            if int(facts.split()[1]) == os.getpid():
                found.append(int(process.name))
    return found


def _die_with(starter: int, number: int) -> None:
    """Has the kernel send this process a signal when its starter is gone, however that came; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != starter:  # it was gone before that
        os._exit(1)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])  # what its starter finds, it finds
    serve(int(sys.argv[1]), sys.argv[3:])
