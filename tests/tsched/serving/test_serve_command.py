"""`tk serve`, as a process: the page's example, what is said when it cannot start, and how it ends."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI

from experiments.commands.requests import ServeRequest
from experiments.commands.serve import read_served, run
from experiments.document import ExperimentError
from tsched.options import Option
from tsched.serving import worker_process
from tsched.serving.gate import ACCESS
from tsched.serving.limits import LIMITS, ServerLimits
from tsched.serving.logs import MOST_WAITING, JsonLines, log_lines
from tsched.serving.supervisor import SupervisedClient

ROOT = Path(__file__).parents[3]
TK = [sys.executable, "-c", "from experiments.cli import main; main()", "serve"]


def _hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def _killed_in_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()  # which does nothing to one that has ended


def test_the_example_of_both_pages_prints_text_and_a_signal_ends_the_server(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/serving.md")]
    (example,) = {one for page in pages for one in re.findall(r"```python\n(from openai.*?)```", page, flags=re.DOTALL)}
    command = [*TK, str(checkpoint), "--name", "tiny", "--port", "0", "--kv-cache-bytes", "1MB"]
    command = ["bash", "-c", 'ulimit -Sn 512; exec "$@"', "bash", *command]
    with (
        # Under nohup this process ignores SIGHUP, and so would the server.
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_hangups
        ) as process,
        _killed_in_the_end(process),
    ):
        assert process.stdout is not None
        base = re.search(r"http://\S+/v1", process.stdout.readline())
        assert base is not None
        # The client asks again while the server says 503: the model is being loaded.
        source = example.replace("http://127.0.0.1:8000/v1", base.group()).replace('"none"', '"none", max_retries=100')
        exec(source, {})
        assert len(capsys.readouterr().out) > 8
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in loaded
        assert "triton" not in loaded
        files = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{process.pid}/limits").read_text())
        assert files is not None
        assert files[1] == files[2], "each connection is a file"
        process.send_signal(signal.SIGHUP)
        start, log = process.communicate(timeout=20)
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert ("/v1/completions", 200) in {(line.get("path"), line.get("status")) for line in lines}
    assert "the model tiny is served" in {line.get("message") for line in lines}
    assert "def main" not in log
    assert re.match(
        r"ready after [\d.]+ s: tiny, 128 tokens a request .*\n(kernels: .*\n)+limits: max_in_flight ", start
    )


def test_a_signal_amid_the_loading_is_no_failure() -> None:
    with subprocess.Popen([*TK, "tiny", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = re.search(rb"http://[^/]+:(\d+)", process.stdout.readline())
        assert port is not None
        with socket.create_connection(("127.0.0.1", int(port[1])), timeout=20) as asking:
            asking.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert asking.recv(9) == b"HTTP/1.1 "
        process.send_signal(signal.SIGTERM)
        said, log = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, b""), log
    assert b"ERROR" not in log
    assert b"error:" not in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/directory"], "no/such/directory"),
        (["tiny", "--kernels", "swiglu"], "must be op=variant"),
        (["tiny", "--api-key-file", "missing.yaml"], "missing.yaml"),
    ],
)
def test_what_cannot_start_says_why_and_exits_with_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run([*TK, *arguments, "--port", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert said in done.stderr.split("error:")[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run([*TK, "tiny", "--port", port], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr


def test_an_experiments_arm_is_served_and_a_sweep_refused(tmp_path: Path) -> None:
    file = tmp_path / "served.yaml"
    text = """
name: served
model: {preset: tiny}
dtype: float32
kernels: {paged_decode: {split_kv: {num_splits: 4}}, swiglu: fused}
scheduler: {prefix_cache: radix, max_num_seqs: 4}
serving: {queue_timeout: 5, max_in_flight: 16}
"""
    file.write_text(text)
    served = read_served(file)
    assert served.model == "tiny"
    assert served.kernels == {"paged_decode": {"split_kv": {"num_splits": 4}}, "swiglu": "fused"}
    assert {"prefix_cache": "radix", "max_num_seqs": 4, "dtype": "float32"}.items() <= served.engine.items()
    assert served.limits == {"queue_timeout": 5, "max_in_flight": 16}
    SupervisedClient(served.model, kernels=served.kernels, **served.engine)  # the options are an engine's
    for written, instead, said in (
        ("swiglu: fused", "swiglu: [torch, fused]", "sweeps swiglu"),
        ("max_num_seqs: 4", "max_num_seqs: [4, 8]", "sweeps scheduler.max_num_seqs"),
        ("{preset: tiny}", "[{preset: tiny}, {preset: tiny-llama}]", "a server has one arm"),
        ("dtype: float32", "batching: static", "batches continuously"),
        ("model: {preset: tiny}", "seed: 1", "needs"),
        (
            "queue_timeout: 5",
            "queue_timeout: [5, 6]",
            r"serving.queue_timeout .*must be a number above 0, got \[5",
        ),
        ("max_in_flight: 16", "max_in_flight: 0", r"serving.max_in_flight .*must be None or an integer .*, got 0"),
        ("queue_timeout: 5", "queue_timeot: 5", "unknown key: .*did you mean 'queue_timeout'"),
    ):
        file.write_text(text.replace(written, instead))
        with pytest.raises(ExperimentError, match=said):
            read_served(file)


def test_a_flag_goes_over_the_files_limit_and_all_limits_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "served.yaml"
    file.write_text(
        "name: a\nmodel: {preset: tiny}\nserving: {queue_timeout: 5, drain_timeout: 7.5, stall_timeout: 3}\n"
    )
    apps: list[FastAPI] = []
    monkeypatch.setattr("tsched.serving.http.serve", lambda app, listening, _: apps.append(app) or listening.close())
    assert run(ServeRequest(str(file), port=0, limits={"queue_timeout": 6.0, "max_body_bytes": 1000})) == 0
    front = apps[0].state.front_end
    given = {"queue_timeout": 6.0, "drain_timeout": 7.5, "stall_timeout": 3.0, "max_body_bytes": 1000}
    assert front.limits == ServerLimits(**given)
    assert front.client._stall_timeout == 3.0


@pytest.mark.parametrize("one", LIMITS.values(), ids=lambda one: str(one.name))
def test_the_page_has_a_row_for_each_limit(one: Option) -> None:
    row = f"| `{one.name}` | {one.usual} | {one.meaning} |"
    assert row in (ROOT / "docs/serving.md").read_text(encoding="utf-8").splitlines()


def test_a_missing_extra_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.commands.serve._is_installed", lambda name: name not in ("fastapi", "uvicorn"))
    with pytest.raises(ExperimentError, match=r"needs fastapi, uvicorn: pip install 'tkernels\[serve\]'"):
        run(ServeRequest("tiny"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("killed", "the engine's process is no more: it was killed by signal 9"),
        ("broken", "the model cannot be served: ConfigError: no such model"),
    ],
)
def test_a_worker_that_dies_or_fails_while_it_loads_ends_the_server(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = worker_process._PROGRAM.replace("tsched.serving.worker", "tests.tsched.serving.scripted_worker")
    monkeypatch.setattr(worker_process, "_PROGRAM", program)
    with pytest.raises(ExperimentError, match=said):
        run(ServeRequest(str(tmp_path), name=name, port=0))
    (life,) = tmp_path.iterdir()
    assert not Path(f"/proc/{life.read_text()}").exists()
    assert re.match(r"listening at http://127.0.0.1:\d{2,}/v1; loading ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ServeRequest("tiny", host="203.0.113.1"), "cannot listen at 203.0.113.1:8000: Cannot assign "),
        (ServeRequest("tiny", host="no.such.invalid"), "cannot listen at no.such.invalid:8000: "),
        (ServeRequest("tiny", limits={"max_in_flight": 0}), "max_in_flight must be None or an integer of "),
        (ServeRequest("tiny", chat_template=Path("bad.jinja")), "^bad.jinja: the chat template is no .* line 1"),
        (ServeRequest("tiny", engine={"block_size": 3}), "block_size must be .* a power of two, got 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_worker_starts(
    request_: ServeRequest, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jinja").write_text("{% for %}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tsched.serving.supervisor.start_process", lambda: pytest.fail("a worker was started"))
    with pytest.raises(ExperimentError, match=said):
        run(request_)


def test_a_log_that_nobody_reads_holds_nothing_up() -> None:
    read, write = os.pipe()
    log, root = logging.getLogger("tsched.serving"), logging.getLogger()
    before = root.level, [*root.handlers]
    with log_lines(write):
        for i in range(2 * MOST_WAITING):  # more than the pipe and the queue hold
            log.info("line %d", i)
        with open(read, "rb") as pipe:
            lines = [json.loads(pipe.readline())["message"] for _ in range(MOST_WAITING)]
        assert lines == [f"line {i}" for i in range(MOST_WAITING)]
    assert (root.level, root.handlers) == before
    os.close(write)


def test_log_records_are_lines_of_json() -> None:
    lines = JsonLines()
    record = logging.LogRecord("tsched.serving", logging.ERROR, "", 0, "two\nlines of %s", ("it",), None)
    assert json.loads(lines.format(record)) == {
        "time": round(record.created, 3), "level": "error", "message": "two\nlines of it",
    }  # fmt: skip
    access = logging.LogRecord(ACCESS.name, logging.INFO, "", 0, '{"id": 1}', (), None)
    assert lines.format(access) == '{"id": 1}'
