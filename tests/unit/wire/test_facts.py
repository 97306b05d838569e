"""Facts that an agent repeats to the next coordinator: the last messages of living workers, and the
lost workers.
"""

from __future__ import annotations

from chaoskit.wire.announcements import Facts
from chaoskit.wire.messages import (
    Endpoint,
    Formed,
    Healed,
    OfferedSnapshot,
    SourceFailed,
    StartWorker,
    StopWorker,
    WorkerFailed,
    WorkerLost,
)

LOST = WorkerLost("a.0", "a", "killed", "", 1)
FAILED = WorkerFailed("a.0", "ZeroDivisionError", fatal=False)


def unreadable(step: int) -> SourceFailed:
    copy = OfferedSnapshot("b", "b.0", step, 1, 100, "checksum", Endpoint("host", "b", 1, 2, 3))
    return SourceFailed("a.0", copy, corrupt=False, detail="")


def repeated(*messages: object) -> list[object]:
    facts = Facts()
    for message in messages:
        facts.note(message)
    return list(facts.tell())


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
    """A coordinator decided the loss and no agent reports it: its messages would pass for those of
    a living worker.
    """
    facts = Facts()
    messages = (
        StartWorker("a.0"),
        Formed("a.0", 1),
        StopWorker("a.0", "hung"),
        Healed("a.0", 1),
    )  # before the worker was killed
    for message in messages:
        facts.note(message)
    assert list(facts.tell()) == []


def test_why_a_worker_failed_is_told_before_its_loss() -> None:
    """A coordinator counts raised errors; it needs no messages of a worker that it knows as
    lost.
    """
    assert repeated(FAILED, LOST) == repeated(LOST, FAILED) == [FAILED, LOST]


def test_each_copy_that_failed_is_told_again_until_the_worker_has_the_state() -> None:
    assert repeated(unreadable(3), unreadable(4), unreadable(3)) == [unreadable(3), unreadable(4)]
    assert repeated(unreadable(3), Healed("a.0", 2)) == [Healed("a.0", 2)]
    assert repeated(unreadable(3), LOST) == [LOST]


def test_what_a_coordinator_has_in_its_record_is_not_kept() -> None:
    """The coordinator shows this by giving up the worker.

    Otherwise each hello would contain every worker that ever ended.
    """
    assert repeated(FAILED, LOST, StopWorker("a.0", "killed")) == []
    facts = Facts()
    for message in (LOST, StopWorker("a.0", "killed")):
        facts.note(message)
    assert facts.ended == ()


def test_after_any_number_of_workers_nothing_is_left() -> None:
    """Ended workers leave no facts, whether their connection ends before or after the answers of
    the coordinator.
    """
    empty = {name: len(kept) for name, kept in vars(Facts()).items()}
    facts = Facts()
    for number in range(100):
        worker = f"a.{number}"
        lost = WorkerLost(worker, "a", "killed", "", 1)
        facts.note(StartWorker(worker))
        facts.note(Formed(worker, number))
        if number % 2:
            facts.close(worker)
        for message in (
            WorkerFailed(worker, "error", fatal=False),
            lost,
            StopWorker(worker, "killed"),
        ):
            facts.note(message)
        if not number % 2:
            facts.close(worker)
        facts.note(StopWorker(worker, "killed"))
    assert {name: len(kept) for name, kept in vars(facts).items()} == empty
