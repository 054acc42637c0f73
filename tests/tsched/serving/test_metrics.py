"""/metrics: what is counted adds up, what is measured is what a client sees, and dashboards find vLLM's names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.tsched.serving.conftest import OPTIONS, RunningServer
from tests.tsched.serving.scripted_client import ScriptedClient
from tests.tsched.serving.scripted_worker import (
    ANSWER,
    HALVE_ONCE,
    MUMBLE_ONCE,
    RAISE,
    SILENT_ONCE,
    SPEAK_AND_WAIT,
    SPEAK_ONCE,
)
from tests.tsched.serving.test_operations import TEXT, Start, at_rest, open_request, start, wait_for  # noqa: F401
from tsched.serving import metrics as metrics_room
from tsched.serving import supervisor, worker_process
from tsched.serving.app import create_app
from tsched.serving.auth import Keys, Tenant
from tsched.serving.engine_client import Delta, RequestTimes, SampleDelta, StatsSnapshot
from tsched.serving.limits import ServerLimits
from tsched.serving.local_client import LocalClient
from tsched.serving.metrics import Metrics
from tsched.serving.supervisor import SupervisedClient

ADMIN, USER = "sk-admin-0123456789", "sk-alice-0123456789"

_PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
_LATENCY = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
_COUNTS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000"
VLLM_BUCKETS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
    "inter_token_latency_seconds": _PER_TOKEN,
    "request_time_per_output_token_seconds": _PER_TOKEN,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_prompt_tokens": _COUNTS,
    "request_generation_tokens": _COUNTS,
}
FINER = {
    "inter_token_latency_seconds": "0.0005 0.001 0.0025 0.005",
    "request_queue_time_seconds": "0.005 0.01 0.025 0.05 0.1 0.2",
}
OTHERS = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prompt_tokens_total "
    "generation_tokens_total num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total "
)


def samples(server: RunningServer) -> list[Any]:
    text = server.get("/metrics").body.decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(server: RunningServer, name: str, **labels: str) -> float:
    found = [one for one in samples(server) if one.name == name and labels.items() <= one.labels.items()]
    return sum(one.value for one in found)


def check_sums(server: RunningServer) -> None:
    """Every request that was received was refused or finished, once nothing is in work."""
    deadline = time.monotonic() + 10
    while server.front.exchanges and time.monotonic() < deadline:
        time.sleep(0.01)
    received = total(server, "tkernels_requests_received_total")
    refused = total(server, "tkernels_requests_refused_total")
    assert received == refused + total(server, "vllm:request_success_total")
    assert total(server, "vllm:e2e_request_latency_seconds_count") == received - refused
    assert total(server, "vllm:num_requests_running") == total(server, "vllm:num_requests_waiting") == 0


def ask(server: RunningServer, prompt: list[int], **changes: Any) -> Any:
    body = {"model": server.front.client.facts.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", body | changes)


def leave_early(server: RunningServer, prompt: list[int]) -> None:
    """Asks for a stream, reads its first bytes and hangs up."""
    asked = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
    connection = HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"model": server.front.client.facts.name, **asked})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().read(1)
    connection.close()


def test_received_is_refused_and_finished_by_reason_with_aborts(server: RunningServer) -> None:
    before = {name: total(server, "vllm:request_success_total", finished_reason=name) for name in ("length", "abort")}
    for i in range(3):
        assert ask(server, [5, 6, 7 + i]).status == 200
    assert ask(server, [5, 6], n=2, temperature=1.0).status == 200
    assert ask(server, [300]).status == 400
    assert ask(server, [5], top_p=7).status == 400
    assert ask(server, [5], n=1000, temperature=1.0).status == 400
    assert server.post("/v1/completions", b"{").status == 400
    leave_early(server, [5, 6, 7])
    check_sums(server)
    assert total(server, "vllm:request_success_total", finished_reason="length") == before["length"] + 4
    assert total(server, "vllm:request_success_total", finished_reason="abort") == before["abort"] + 1
    assert total(server, "tkernels_requests_refused_total", reason="invalid_json") >= 1
    assert total(server, "vllm:generation_tokens_total") >= 4 * 3
    computed = total(server, "vllm:prompt_tokens_total") + total(server, "vllm:generation_tokens_total")
    assert 0 < total(server, "vllm:iteration_tokens_total_sum") <= computed + 1e-6
    assert total(server, "tkernels_step_phase_seconds_total", phase="forward") > 0
    assert total(server, "tkernels_step_phase_seconds_total", phase="step") > 0


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    program = worker_process._PROGRAM.replace("tsched.serving.worker", "tests.tsched.serving.scripted_worker")
    monkeypatch.setattr(worker_process, "_PROGRAM", program)
    monkeypatch.setattr(supervisor, "restart_delay", lambda deaths, now: 0.2)
    running = RunningServer(create_app(SupervisedClient(tmp_path), ServerLimits(drain_timeout=1))).wait_until_ready()
    yield running
    running.stop()


def test_a_kill_is_an_error_frame_and_is_counted(scripted: RunningServer) -> None:
    answers: dict[str, Any] = {}

    def begin(name: str, token: int, stream: bool = True) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: ask(scripted, [token], stream=stream)}))
        thread.start()
        return thread

    threads = [begin("spoke", SPEAK_AND_WAIT), begin("silent", SILENT_ONCE), begin("mumbled", MUMBLE_ONCE)]
    threads.append(begin("whole", SPEAK_ONCE, stream=False))
    while total(scripted, "vllm:time_to_first_token_seconds_count") < 3:
        time.sleep(0.01)
    while len(scripted.front.client._served) < 4:
        time.sleep(0.01)
    os.kill(scripted.front.client.worker_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert b"[DONE]" not in answers["spoke"].body
    assert b"SIGKILL" in answers["spoke"].body.split(b"\n\n")[-2]
    for name in ("silent", "mumbled"):
        assert "".join(event["choices"][0]["text"] for event in answers[name].events) == "ab"
    whole = answers["whole"].json
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("ab", 2), "it begins anew"
    assert ask(scripted, [RAISE]).error["message"] == "the engine failed: RuntimeError: planted"
    check_sums(scripted)
    assert total(scripted, "vllm:request_success_total", finished_reason="error") == 2
    assert total(scripted, "vllm:request_success_total", finished_reason="stop") == 3
    while total(scripted, "tkernels_worker_restarts_total") < 2:  # the failure is told before the process has ended
        time.sleep(0.01)
    scripted.wait_until_ready()
    assert ask(scripted, [ANSWER]).status == 200
    check_sums(scripted)
    assert total(scripted, "vllm:request_queue_time_seconds_count") == 4
    assert total(scripted, "vllm:request_decode_time_seconds_sum") == pytest.approx(0.8)


def test_a_completion_that_ends_in_two_lives_has_one_reason(scripted: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, scripted, [HALVE_ONCE], n=2, temperature=1.0)
        while total(scripted, "vllm:time_to_first_token_seconds_count") < 1:
            time.sleep(0.01)
        os.kill(scripted.front.client.worker_pid, signal.SIGKILL)
        choices = asked.result().json["choices"]
    assert [one["finish_reason"] for one in choices] == ["stop", "stop"]
    check_sums(scripted)
    finished = [one for one in samples(scripted) if one.name == "vllm:request_success_total" and one.value]
    assert [one.labels["finished_reason"] for one in finished] == ["stop"]
    assert total(scripted, "vllm:request_generation_tokens_sum") == 2


def test_dashboards_find_vllms_names_and_all_of_its_buckets(server: RunningServer) -> None:
    assert ask(server, [5, 6, 7]).status == 200
    found = samples(server)
    assert {f"vllm:{name}" for name in OTHERS.split()} <= {sample.name for sample in found}
    model = {"model_name": server.front.client.facts.name, "engine": "0"}
    assert all(model.items() <= sample.labels.items() for sample in found if sample.name.startswith("vllm:"))


def test_histograms_have_all_buckets_of_vllms_and_finer_ones(tmp_path: Path) -> None:
    metrics = Metrics(LocalClient(tmp_path))
    meter = metrics.begin_request()
    for i in range(3):
        meter.take(0, Delta([SampleDelta(0, [i], "", None)], i == 2, times=RequestTimes(0, 0, 0) if i == 2 else None))
    meter.end(200, None, ["stop"], 1)
    metrics._take_stats(StatsSnapshot(0, 0, 1, 0, 1, 1, 0, 0, 0, 0))
    text = metrics.expose(metrics.read_engine()).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for name, bounds in VLLM_BUCKETS.items():
        mine = {float(sample.labels["le"]) for sample in found if sample.name == f"vllm:{name}_bucket"}
        assert {float(bound) for bound in f"{bounds} {FINER.get(name, '')}".split()} <= mine, name


def test_the_engine_is_asked_on_the_event_loop_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    server, _ = start()
    asked: list[tuple[str, int | None]] = []
    facts, stats = ScriptedClient.facts.fget, ScriptedClient.stats
    assert facts is not None

    def note(name: str, real: Callable[[ScriptedClient], Any]) -> Callable[[ScriptedClient], Any]:
        return lambda client: (asked.append((name, threading.get_ident())), real(client))[1]

    monkeypatch.setattr(ScriptedClient, "facts", property(note("facts", facts)))
    monkeypatch.setattr(ScriptedClient, "stats", note("stats", stats))
    assert total(server, "vllm:num_requests_running") == 0
    assert {name for name, _ in asked} == {"facts", "stats"}
    assert {thread for _, thread in asked} == {server._thread.ident}


def test_a_loop_that_is_held_up_lags_by_that_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_room, "_LAG_S", 0.01)
    metrics = Metrics(LocalClient(tmp_path))

    async def main() -> None:
        watching = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0)
        time.sleep(0.05)  # instead of giving the loop back
        await asyncio.sleep(0.005)
        watching.cancel()

    asyncio.run(main())
    values = {one.name: one.value for family in metrics.registry.collect() for one in family.samples}
    assert values["tkernels_event_loop_lag_seconds_count"] >= 1
    assert values["tkernels_event_loop_lag_seconds_sum"] >= 0.035


def test_the_lag_of_the_event_loop_is_measured(server: RunningServer) -> None:
    deadline = time.monotonic() + 20
    while total(server, "tkernels_event_loop_lag_seconds_count") == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert total(server, "tkernels_event_loop_lag_seconds_count") > 0


LABELLED = {"request_success_total": "finished_reason", "admission_rejections_total": "reason"}


def test_each_histogram_counts_a_request_once_and_the_plans_counters_have_their_labels(
    start: Start,  # noqa: F811
) -> None:
    """Whole ones, a list of prompts with several completions, an abort and a refusal at the door."""
    server, client = start(limits={"max_in_flight": 4})
    assert server.post("/v1/completions", TEXT).status == 200
    assert server.post("/v1/completions", TEXT | {"prompt": ["a", "b"], "n": 2}).status == 200
    client.pace = 0.2
    connection = open_request(server, TEXT | {"prompt": ["a", "b"], "n": 2, "max_tokens": 100})
    wait_for(lambda: len(client.running) == 2)
    assert server.post("/v1/completions", TEXT).status == 429
    while total(server, "vllm:time_to_first_token_seconds_count") < 3:
        time.sleep(0.005)
    connection.close()
    wait_for(lambda: at_rest(server))
    counts = {name: total(server, f"vllm:{name}_count") for name in VLLM_BUCKETS if not name.startswith("iteration")}
    once = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens")
    once += ("request_generation_tokens",)
    assert {name: counts[name] for name in once} == dict.fromkeys(once, 3)
    assert counts["request_time_per_output_token_seconds"] in (2, 3), "the third may have had its first tokens alone"
    phases = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert {name: counts[name] for name in phases} == dict.fromkeys(phases, 2), "an engine has no times of an abort"
    for name, label in LABELLED.items():
        assert {label, "model_name", "engine"} == set(
            next(s for s in samples(server) if s.name == f"vllm:{name}").labels
        )
    assert total(server, "vllm:request_success_total", finished_reason="abort") == 1
    assert total(server, "vllm:admission_rejections_total", reason="in_flight") == 1


def test_each_server_has_a_registry_of_its_own(server: RunningServer, tmp_path: Path) -> None:
    other = Metrics(LocalClient(tmp_path))
    other.begin_request()
    assert b'tkernels_requests_received_total{engine="0",model_name=""} 1.0' in other.expose(other.read_engine())
    assert not [name for name in prometheus_client.REGISTRY._names_to_collectors if "vllm" in name or "tker" in name]


def test_what_is_measured_is_what_a_client_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, the second with outputs of two tokens: times by a clock that the test sets."""
    now = 0.0
    monkeypatch.setattr(metrics_room, "time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics(LocalClient(tmp_path))
    meter = metrics.begin_request()
    for then, prompt, ids in [(0.2, 0, [1]), (0.3, 1, [1, 2]), (0.5, 0, [2]), (0.9, 1, [3, 4]), (1.0, 0, [])]:
        now = then
        meter.take(prompt, Delta([SampleDelta(0, ids, "", None)], False))
    now = 1.5
    meter.take(0, Delta([SampleDelta(0, [], "", None, "stop")], True, times=RequestTimes(0.1, 0.2, 0.3)))
    meter.end(200, None, ["stop", "length"], 7)
    text = metrics.expose(metrics.read_engine()).decode()
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.3 + 0.6)
    assert values["vllm:inter_token_latency_seconds_count"] == 2
    assert values["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(1.5)
    assert values["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx((0.9 - 0.2) / 2)
    assert values["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.2)
    assert (values["vllm:request_prompt_tokens_sum"], values["vllm:request_generation_tokens_sum"]) == (7, 6)
    assert 'finished_reason="length"' in text


@pytest.mark.parametrize(
    ("error", "finish_reasons", "reason"),
    [
        (None, ["stop", "length", "stop"], "length"),
        (None, ["length", "abort"], "abort"),
        (None, ["error", "stop"], "error"),
        (None, [], "abort"),
        ("client_gone", ["stop"], "abort"),
        ("engine_error", [], "error"),
        ("internal_error", [], "error"),
        ("unsatisfiable", [], "error"),
        ("queue_timeout", [], "timeout"),
        ("request_timeout", [], "timeout"),
    ],
)
def test_a_request_that_was_taken_has_one_reason(
    error: str | None, finish_reasons: list[str], reason: str, tmp_path: Path
) -> None:
    metrics = Metrics(LocalClient(tmp_path))
    metrics.begin_request().end(500 if error else 200, error, finish_reasons, 1)
    counted = [one for family in metrics.registry.collect() for one in family.samples if one.value]
    reasons = [one.labels["finished_reason"] for one in counted if one.name == "vllm:request_success_total"]
    assert reasons == [reason]
    assert "tkernels_requests_refused_total" not in {one.name for one in counted}


def test_what_ends_a_request_that_has_tokens_is_no_refusal(tmp_path: Path) -> None:
    metrics = Metrics(LocalClient(tmp_path))
    meter = metrics.begin_request()
    meter.take(0, Delta([SampleDelta(0, [1], "", None)], False))
    meter.end(503, "unavailable", [], 1)
    counted = [one for family in metrics.registry.collect() for one in family.samples if one.value]
    reasons = [one.labels["finished_reason"] for one in counted if one.name == "vllm:request_success_total"]
    assert reasons == ["abort"]
    assert "tkernels_requests_refused_total" not in {one.name for one in counted}


def test_the_tokens_of_a_step_are_those_since_the_last_one(tmp_path: Path) -> None:
    metrics = Metrics(LocalClient(tmp_path))
    seen = []
    for num_steps, num_prompt, num_output in ((1, 10, 1), (2, 10, 3), (4, 16, 7)):
        metrics._take_stats(
            StatsSnapshot(
                0, 0, 1, 0, num_steps, num_prompt, num_output, num_preemptions=0, num_cache_queries=0, num_cache_hits=0
            )
        )
        values = {one.name: one.value for family in metrics.registry.collect() for one in family.samples}
        seen.append([values[f"vllm:iteration_tokens_total_{name}"] for name in ("count", "sum")])
    assert seen == [[1, 11], [2, 13], [4, 23]]


def test_what_a_dead_engine_made_is_not_counted_with_what_the_next_makes_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two prompts starts over once; the second had ended."""
    now = 0.0
    monkeypatch.setattr(metrics_room, "time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics(LocalClient(tmp_path))
    meter = metrics.begin_request()
    lives = [(0.1, 0, [1], False), (0.3, 0, [2], False), (1.0, 1, [3], False), (9.0, 0, [1], True)]
    for then, prompt, ids, starts_over in [*lives, (9.2, 0, [2, 4], False)]:
        now = then
        meter.take(prompt, Delta([SampleDelta(0, ids, "", None)], False, starts_over=starts_over))
    meter.end(200, None, ["stop", "stop"], 2)
    values = {one.name: one.value for family in metrics.registry.collect() for one in family.samples}
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.2 + 0.2), "no span over the restart"
    assert values["vllm:request_generation_tokens_sum"] == 1 + 3
    assert values["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx((9.2 - 1.0) / (4 / 2 - 1))


def test_gpus_show_their_use_where_nvml_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(LocalClient(tmp_path))
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = OSError
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex = lambda: 2, lambda index: index
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=10 + handle, total=100)
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=25)
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    text = metrics.expose(metrics.read_engine()).decode()
    assert 'tkernels_device_memory_used_bytes{device="GPU-1"} 11.0' in text
    assert 'tkernels_device_memory_total_bytes{device="GPU-1"} 100.0' in text
    assert 'tkernels_device_utilization_ratio{device="GPU-0"} 0.25' in text

    def fail() -> None:
        raise nvml.NVMLError("no driver")

    nvml.nvmlInit = fail
    assert b"GPU-" not in metrics.expose(metrics.read_engine())


@pytest.fixture(scope="module")
def guarded(chat_checkpoint: Path) -> Iterator[RunningServer]:
    keys = Keys({ADMIN: Tenant("root", is_admin=True), USER: Tenant("alice")})
    running = RunningServer(create_app(LocalClient(chat_checkpoint, **OPTIONS), keys=keys)).wait_until_ready()
    yield running
    running.stop()


def swap(server: RunningServer, kernels: Any, key: str | None = ADMIN) -> Any:
    return server.post("/admin/kernels", {"kernels": kernels}, {"authorization": f"Bearer {key}"} if key else {})


def test_an_admin_swaps_kernels_and_metrics_carry_the_arm(guarded: RunningServer) -> None:
    user = {"authorization": f"Bearer {USER}"}
    answer = swap(guarded, {"rms_norm": {"row_per_program": {"num_warps": 2}}, "matmul": None})
    assert answer.status == 200
    assert answer.json["arm"]["rms_norm"] == "row_per_program[num_warps=2]"
    assert answer.json["first_step"] == guarded.front.client.stats().num_steps
    arms = guarded.get("/metrics", user).body.decode()
    assert 'op="rms_norm",variant="row_per_program[num_warps=2]"} 1.0' in arms
    body = {"model": "random", "prompt": [5, 6], "max_tokens": 2}
    assert guarded.post("/v1/completions", body, user).status == 200
    assert swap(guarded, {"rms_norm": None}).json["arm"]["rms_norm"] == "torch"


@pytest.mark.parametrize(
    ("kernels", "param", "said"),
    [
        ({"rms_norm": "row_per_progra"}, "kernels", "did you mean 'row_per_program'"),
        ({"rms_nor": "torch"}, "kernels", "rms_norm"),
        ({"merge_states": "torch"}, "kernels", "does not use that op"),
        ({"rms_norm": 3}, "kernels", ""),
        ([], "kernels", ""),
    ],
)
def test_a_swap_that_cannot_be_is_refused_with_its_reason(
    guarded: RunningServer, kernels: Any, param: str, said: str
) -> None:
    before = guarded.front.client.stats().arm
    answer = swap(guarded, kernels)
    assert answer.status == 400
    assert answer.error["param"].startswith(param)
    assert said in answer.error["message"]
    assert guarded.front.client.stats().arm == before


def test_swaps_need_an_admins_key_of_their_own(guarded: RunningServer, server: RunningServer) -> None:
    assert swap(guarded, {}, USER).status == swap(guarded, {}, None).status == 401
    assert guarded.get("/metrics").status == 401
    assert swap(server, {}).status == 404  # there are no keys
