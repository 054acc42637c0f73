"""Faults that a server could have are planted, and the tests that are there for them fail."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.tsched.serving import test_bad_input, test_operations
from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.test_operations import TEXT, Start, start  # noqa: F401  a fixture
from tsched.serving import exchange
from tsched.serving.admission import Ticket
from tsched.serving.auth import OPEN_PATHS
from tsched.serving.exchange import Exchange
from tsched.serving.front_end import FrontEnd
from tsched.serving.protocol.json_body import parse_json
from tsched.serving.responses import DONE, error_frame

Plant = Callable[[pytest.MonkeyPatch], None]


def drop_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "end", lambda self, reason: None)


def keep_tickets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ticket, "give_back", lambda self: None)


def end_failures_as_if_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exchange, "error_frame", lambda error: error_frame(error) + DONE)


def tokenize_before_counting(patch: pytest.MonkeyPatch) -> None:
    admit = Exchange._admit

    def admit_late(self: Any, request: Any, num_bytes: int) -> Ticket:
        self._front.codec.encode(request.prompt)
        return admit(self, request, num_bytes)

    patch.setattr(Exchange, "_admit", admit_late)


def say_healthy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrontEnd, "readiness", lambda self: {"status": "ready"})


def forget_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tsched.serving.auth.OPEN_PATHS", OPEN_PATHS | {"/tokenize"})


def share_salts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tsched.serving.auth.Tenant.salt", lambda self, asked: asked or "")


def refuse_nothing_while_draining(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrontEnd, "drain", FrontEnd.end_all)


FAULTS: list[tuple[Plant, Callable[..., None], dict[str, Any]]] = [
    (
        drop_aborts,
        test_operations.test_a_request_whose_client_left_is_aborted,
        {"first": 60.0, "body": TEXT, "stream": False},
    ),
    (keep_tickets, test_operations.test_rates_are_of_each_key, {}),
    (
        end_failures_as_if_whole,
        test_operations.test_a_failing_engine_is_said_and_no_stream_ends_as_if_it_were_whole,
        {"stream": True, "fails_after": 2},
    ),
    (say_healthy, test_operations.test_a_loading_restarting_or_dead_engine_is_not_ready, {}),
    (forget_the_key, test_operations.test_the_key_guards_every_route_but_three, {}),
    (share_salts, test_operations.test_tenants_have_salts_and_priorities_of_their_own, {}),
    (refuse_nothing_while_draining, test_operations.test_a_drain_lets_streams_end_and_refuses_new_requests, {}),
]


@pytest.mark.parametrize(("plant", "test", "arguments"), FAULTS, ids=[plant.__name__ for plant, _, _ in FAULTS])
def test_a_planted_fault_fails_its_test(
    plant: Plant,
    test: Callable[..., None],
    arguments: dict[str, Any],
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    wait = test_operations.wait_for
    monkeypatch.setattr(test_operations, "wait_for", lambda condition, seconds=20.0: wait(condition, min(seconds, 0.3)))
    with pytest.raises((AssertionError, ConnectionError)):  # the second where the server has ended
        test(start=start, **arguments)
    monkeypatch.undo()  # the server that is left stops as a sound one


def test_tokenizing_before_counting_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tokenize_before_counting(monkeypatch)
    with pytest.raises(AssertionError):
        test_operations.test_overload_is_refused_at_the_door_untokenized_and_the_admitted_finish(start, monkeypatch)


def test_a_swallowed_parameter_is_noticed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse_and_drop(kind: Any, body: bytes) -> Any:
        return kind.model_validate({name: one for name, one in parse_json(body).items() if name in kind.model_fields})

    monkeypatch.setattr(exchange, "parse_request", parse_and_drop)
    with pytest.raises(AssertionError):
        test_bad_input.test_a_wrong_field_is_named(
            TEXT, {"temprature": 1}, "unsupported_parameter", "temprature", server
        )
