"""Faults that a server could have are planted, and the tests that are there for them fail."""

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.tsched.serving import test_answers, test_bad_input, test_cancels, test_operations, test_supervisor
from tests.tsched.serving.test_answers import llm  # noqa: F401  a fixture
from tests.tsched.serving.test_cancels import slow_prefill  # noqa: F401  a fixture
from tests.tsched.serving.test_operations import TEXT, start  # noqa: F401  a fixture
from tests.tsched.serving.test_supervisor import scripted  # noqa: F401  a fixture
from tsched.execution.engine_thread import EngineThread
from tsched.serving import exchange, supervisor
from tsched.serving.admission import Ticket
from tsched.serving.auth import OPEN_PATHS
from tsched.serving.engine_client import Delta, EngineFailedError, SampleDelta, StatsSnapshot
from tsched.serving.exchange import Exchange
from tsched.serving.front_end import FrontEnd
from tsched.serving.http import DeadlineProtocol
from tsched.serving.protocol.json_body import parse_json
from tsched.serving.responses import DONE, CompletionWriter, error_frame
from tsched.serving.supervisor import SupervisedClient, WorkerStream

Plant = Callable[[pytest.MonkeyPatch], None]


def drop_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "end", lambda self, reason: None)


def keep_tickets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ticket, "give_back", lambda self: None)


def end_failures_as_if_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exchange, "error_frame", lambda error: error_frame(error) + DONE)


def tokenize_before_counting(patch: pytest.MonkeyPatch) -> None:
    admit = Exchange._admit

    def admit_late(self: Any, request: Any) -> Ticket:
        self._front.codec.encode(getattr(request, "prompt", "a chat"))
        return admit(self, request)

    patch.setattr(Exchange, "_admit", admit_late)


def say_healthy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrontEnd, "readiness", lambda self: {"status": "ready"})


def forget_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tsched.serving.auth.OPEN_PATHS", OPEN_PATHS | {"/tokenize"})


def share_salts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tsched.serving.auth.Tenant.salt", lambda self, asked: asked or "")


def refuse_nothing_while_draining(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrontEnd, "drain", FrontEnd.end_all)


def swallow_unknown_parameters(patch: pytest.MonkeyPatch) -> None:
    def parse_and_drop(kind: Any, body: bytes) -> Any:
        return kind.model_validate({name: one for name, one in parse_json(body).items() if name in kind.model_fields})

    patch.setattr(exchange, "parse_request", parse_and_drop)


def keep_aborts_from_the_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineThread, "abort", lambda self, ticket: None)


def end_killed_streams_as_if_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerStream, "fail", lambda self, error: self.put(Delta([], True)))


def serve_again_what_has_spoken(patch: pytest.MonkeyPatch) -> None:
    hand_on = SupervisedClient._hand_on

    def forgetful(self: SupervisedClient, request_id: str, delta: Delta) -> None:
        served = self._served.get(request_id)
        hand_on(self, request_id, delta)
        if served is not None:
            served.has_sent = False

    patch.setattr(SupervisedClient, "_hand_on", forgetful)


def count_from_zero_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    def forget(before: StatsSnapshot | None, now: StatsSnapshot) -> StatsSnapshot:
        return now

    patch.setattr(supervisor, "add_counts", forget)


def fail_what_has_said_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supervisor, "_MOST_LIVES", 0)


def take_requests_while_restarting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SupervisedClient, "_why_unavailable", lambda self: ("", 0.0))


def lose_tokens_in_joined_deltas(patch: pytest.MonkeyPatch) -> None:
    def lose(old: SampleDelta, new: SampleDelta) -> SampleDelta:
        return new

    patch.setattr("tsched.serving.link._join_samples", lose)


def keep_unread_connections(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeadlineProtocol, "pause_writing", H11Protocol.pause_writing)


def let_output_pile_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "_end_stalled", lambda self: None)


def shift_prompt_scores(patch: pytest.MonkeyPatch) -> None:
    add = CompletionWriter.add_prompt
    patch.setattr(CompletionWriter, "add_prompt", lambda self, scores: add(self, [None, *scores[2:], scores[1]]))


def expect_the_end_of_a_killed_stream(tmp_path: Path) -> None:
    test_supervisor.serve(tmp_path, test_supervisor.expect_the_end_of_a_killed_stream)


_KILL = test_supervisor.test_after_a_kill_streams_that_spoke_end_and_the_others_are_served_by_the_next_worker

FAULTS: list[tuple[Plant, Callable[..., None], dict[str, Any]]] = [
    (
        drop_aborts,
        test_operations.test_a_request_whose_client_left_is_aborted,
        {"first": 60.0, "body": TEXT, "stream": False},
    ),
    (
        keep_aborts_from_the_engine,
        test_cancels.test_a_cancelled_requests_blocks_are_free_after_the_step_that_runs,
        {"name": "text", "stream": True},
    ),
    (keep_tickets, test_operations.test_rates_are_of_each_tenant, {}),
    (
        tokenize_before_counting,
        test_operations.test_overload_is_refused_at_the_door_untokenized_and_the_admitted_finish,
        {},
    ),
    (
        swallow_unknown_parameters,
        test_bad_input.test_a_wrong_field_is_named,
        {
            "base": test_bad_input.TEXT,
            "changes": {"temprature": 1},
            "code": "unsupported_parameter",
            "param": "temprature",
        },
    ),
    (
        end_failures_as_if_whole,
        test_operations.test_a_failing_engine_is_said_and_no_stream_ends_as_if_it_were_whole,
        {"stream": True, "fails_after": 2},
    ),
    (end_killed_streams_as_if_whole, expect_the_end_of_a_killed_stream, {}),
    (serve_again_what_has_spoken, expect_the_end_of_a_killed_stream, {}),
    (keep_unread_connections, test_operations.test_a_reader_that_does_not_read_is_given_up, {"stream": False}),
    (let_output_pile_up, test_operations.test_a_reader_that_leaves_much_unread_is_given_up_before_its_time, {}),
    (
        shift_prompt_scores,
        test_answers.test_echo_scores_the_prompt_as_lm_eval_reads_it,
        {"max_tokens": 1, "stream": False},
    ),
    (count_from_zero_after_a_restart, _KILL, {}),
    (fail_what_has_said_nothing, _KILL, {}),
    (take_requests_while_restarting, _KILL, {}),
    (lose_tokens_in_joined_deltas, test_supervisor.test_joined_deltas_say_what_both_say, {}),
    (say_healthy, test_operations.test_a_loading_restarting_or_dead_engine_is_not_ready, {}),
    (forget_the_key, test_operations.test_the_key_guards_every_route_but_three, {"root": "", "prefix": ""}),
    (share_salts, test_operations.test_tenants_have_salts_and_priorities_of_their_own, {}),
    (refuse_nothing_while_draining, test_operations.test_a_drain_lets_streams_end_and_refuses_new_requests, {}),
]
"""A fault, the test that is there for it, and of its arguments those that are no fixtures."""

FAILURES = (AssertionError, ConnectionError, TimeoutError, EngineFailedError, pytest.fail.Exception)
"""How a test fails: by what it asserts, or because what it waits for ends otherwise, or does not come."""

WAITING = (test_operations, test_cancels)
"""Modules whose tests wait for what a fault keeps from coming. The others' waits stay as they are."""

WAITS_S = (0.3, 2.0, 20.0)


@pytest.mark.parametrize(("plant", "test", "arguments"), FAULTS, ids=[plant.__name__ for plant, _, _ in FAULTS])
def test_a_planted_fault_fails_its_test(
    plant: Plant,
    test: Callable[..., None],
    arguments: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With waits so short that the sound server passes in them, here and now: what fails is not its slowness."""
    fixtures = [name for name in inspect.signature(test).parameters if name not in arguments]
    values = {name: request.getfixturevalue(name) for name in fixtures}

    def run(longest_wait: float, plant: Plant = lambda patch: None) -> None:
        wait = test_operations.wait_for
        with monkeypatch.context() as patch:  # the server that is left stops as a sound one
            plant(patch)
            for module in WAITING:
                patch.setattr(
                    module, "wait_for", lambda condition, seconds=20.0: wait(condition, min(seconds, longest_wait))
                )
            test(**arguments, **values)

    longest_wait = find_wait(run) if inspect.getmodule(test) in WAITING else WAITS_S[0]
    with pytest.raises(FAILURES):
        run(longest_wait, plant)


def find_wait(run: Callable[[float], None]) -> float:
    """The first of WAITS_S with which the sound server passes."""
    *shorter, longest = WAITS_S
    for seconds in shorter:
        with contextlib.suppress(*FAILURES):
            run(seconds)
            return seconds
    run(longest)
    return longest
