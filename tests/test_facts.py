"""What an agent says again to the next coordinator: the living's last words, and who was lost."""

from __future__ import annotations

from chaoskit.control.facts import Facts
from chaoskit.messages import Formed, Healed, StopWorker, WorkerLost

LOST = WorkerLost("a.0", "a", "killed", "", 1)


def test_the_last_word_of_each_kind_is_told_again() -> None:
    facts = Facts()
    for message in (Formed("a.0", 1), Healed("a.0", 1), Formed("a.0", 2)):
        facts.note(message)
    assert list(facts.tell()) == [Formed("a.0", 2), Healed("a.0", 1)]


def test_of_a_lost_worker_only_the_loss_is_told_again() -> None:
    facts = Facts()
    for message in (Formed("a.0", 1), LOST, Healed("a.0", 1)):
        facts.note(message)
    assert list(facts.tell()) == [LOST]
    assert facts.ended == ("a.0",)


def test_of_a_worker_that_was_stopped_by_order_nothing_is_told_again() -> None:
    """Its loss was decided by a coordinator and nobody reports it: its words would pass for those of the living."""
    facts = Facts()
    for message in (Formed("a.0", 1), StopWorker("a.0", "hung"), Healed("a.0", 1)):  # said before it was killed
        facts.note(message)
    assert list(facts.tell()) == []
