"""Sequences of one prompt, of which one computes it for all."""

from __future__ import annotations

from tsched.scheduling.sequence import Sequence


class SiblingGroups:
    """The leader of a group is queued like any other sequence; its followers wait here until the leader's prompt has
    been computed, and are forked from it then. Where the leader goes before that, a follower takes its place.
    """

    def __init__(self) -> None:
        self._followers: dict[int, list[Sequence]] = {}  # of a leader, by its id
        self._leader: dict[int, int] = {}  # of a follower, by its id

    def __len__(self) -> int:
        """Sequences that follow."""
        return len(self._leader)

    def form(self, leader: Sequence, followers: list[Sequence]) -> None:
        if followers:
            leader.branch_place = leader.prompt_len - 1  # each computes the last token itself
            self._followers[leader.id] = followers
            self._leader.update((follower.id, leader.id) for follower in followers)

    def remove(self, sequence: Sequence) -> bool:
        """Whether `sequence` followed, which it does no more."""
        leader = self._leader.pop(sequence.id, None)
        if leader is None:
            return False
        followers = self._followers[leader]
        followers.remove(sequence)
        if not followers:
            del self._followers[leader]
        return True

    def disband(self, leader_id: int) -> list[Sequence]:
        """The followers of `leader_id`, who are on their own now."""
        if leader_id not in self._followers:
            return []
        followers = self._followers.pop(leader_id)
        for follower in followers:
            del self._leader[follower.id]
        return followers
