"""Results of collectives that some members lack when a generation begins: they come from the member
that has most.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chaoskit.coordinator.rendezvous import RendezvousBoard, RendezvousReply
from chaoskit.journal import Journal
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.group.regroup import Regrouper
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.wire.messages import Endpoint, Exchange, Get, Member, Plan, Put

NOWHERE = Endpoint("", "", 0, 0, -1)


class Store:
    """The coordinator's store, in this process."""

    def __init__(self) -> None:
        self._board, self._changed = RendezvousBoard(), threading.Condition()

    def begin(self, generation: int, world: int) -> None:
        self._send(self._board.begin(generation, world))

    def ask(self, client: StoreClient, request: Any) -> None:
        with self._changed:
            self._send(self._board.ask(client, request))

    def answer(self, client: StoreClient) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: client.answers)
            return client.answers.pop()

    def _send(self, replies: Sequence[RendezvousReply]) -> None:
        with self._changed:
            for client, message in replies:
                assert isinstance(client, StoreClient)
                client.answers.append(message)
            self._changed.notify_all()


class StoreClient:
    """``Rendezvous`` without a connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.answers: list[Any] = []

    def put(self, generation: int, key: str, value: bytes) -> None:
        self._store.ask(self, Put(generation, key, value))

    def get(self, generation: int, key: str) -> bytes:
        self._store.ask(self, Get(generation, key))
        return bytes(self._store.answer(self).value)

    def exchange(self, generation: int, name: str, rank: int, value: bytes) -> tuple[bytes, ...]:
        self._store.ask(self, Exchange(generation, name, rank, value))
        return tuple(self._store.answer(self).values)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_results_are_handed_over_when_a_generation_begins(tmp_path: Path) -> None:
    """Results go to a member that lacks them and to a joiner.

    If all have the same results, none are sent.
    """
    store, over = Store(), threading.Event()

    def build(rendezvous: Any, plan: Plan, me: Member) -> Group:
        over.wait()
        raise RuntimeError("the test is over")

    names = [f"node{rank}.0" for rank in range(3)]
    members = tuple(
        Member(rank, name, name.split(".")[0], NOWHERE, (rank,)) for rank, name in enumerate(names)
    )
    journals = [Journal(tmp_path, name) for name in names]
    ranks = [
        Regrouper(
            name,
            journal,
            lambda: StoreClient(store),
            build,
            lambda generation: None,
            lambda generation, detail: None,
        )
        for name, journal in zip(names, journals, strict=True)
    ]

    def begin(generation: int, world: int) -> None:
        store.begin(generation, world)
        for rank in ranks[:world]:
            rank.offer(Plan(generation, members[:world], abort=True))

    begin(1, 2)
    for rank in ranks[:2]:
        with rank.advance(rank.membership()):
            rank.step = 3
    with ranks[1].advance(ranks[1].membership()):
        ranks[1].calls.record(3, b"one")
    begin(2, 3)
    met = [rank.membership() for rank in ranks]
    assert [rank.results(formation) for rank, formation in zip(ranks, met, strict=True)] == [
        (b"one",)
    ] * 3
    begin(3, 3)
    with pytest.raises(GenerationSuperseded):
        ranks[0].results(met[0])
    for rank in ranks:
        with rank.advance(rank.membership()):
            rank.step = 3
            rank.calls.adopt(3, (b"one",))
    begin(4, 3)
    assert [rank.membership().holder for rank in ranks] == [None] * 3
    over.set()
    for journal in journals:
        journal.close()
