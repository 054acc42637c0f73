"""Faults that the watch over a worker could have are planted, and the tests that are there for them fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tsched.serving import test_supervisor
from tests.tsched.serving.test_supervisor import scripted  # noqa: F401  a fixture
from tsched.serving import supervisor
from tsched.serving.engine_client import SampleDelta, StatsSnapshot
from tsched.serving.link import join_deltas
from tsched.serving.supervisor import SupervisedClient

Plant = Callable[[pytest.MonkeyPatch], None]


def serve_again_what_has_spoken(patch: pytest.MonkeyPatch) -> None:
    hand_on = SupervisedClient._hand_on

    def forgetful(self: SupervisedClient, request_id: str, delta: supervisor.Delta) -> None:
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


@pytest.mark.parametrize(
    "plant",
    [count_from_zero_after_a_restart, fail_what_has_said_nothing, take_requests_while_restarting],
)
def test_a_planted_fault_fails_the_test_of_a_kill(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    kill = test_supervisor.test_after_a_kill_streams_that_spoke_end_and_the_others_are_served_by_the_next_worker
    with pytest.raises((AssertionError, supervisor.EngineFailedError)):
        kill(tmp_path)


def test_serving_again_what_has_spoken_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream waits for a second worker, or has its first words again."""
    serve_again_what_has_spoken(monkeypatch)
    with pytest.raises((TimeoutError, pytest.fail.Exception)):
        test_supervisor.serve(tmp_path, test_supervisor.expect_the_end_of_a_killed_stream)


def test_a_lost_token_in_joined_deltas_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(old: SampleDelta, new: SampleDelta) -> SampleDelta:
        return new

    monkeypatch.setattr("tsched.serving.link._join_samples", lose)
    assert join_deltas is test_supervisor.join_deltas
    with pytest.raises(AssertionError):
        test_supervisor.test_joined_deltas_say_what_both_say()
