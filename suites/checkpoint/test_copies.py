"""Tests of copies in memory that are damaged, dropped or poisoned.

None of them is ever taken over; training goes on while it can.

-> checkpoint/layout/seal.py: when a copy is valid; coordinator/membership/copy_search.py: which
copy serves.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import Chaos, Outcome
from chaoskit.faults import CorruptReplica, Kill, LosePeerCopy, PoisonSnapshot
from chaoskit.suites.checkpoint.expect import (
    AT,
    SHARDED,
    copied_again,
    ends,
    no_damaged_copy_was_taken,
    sharded,
)

pytestmark = pytest.mark.costly

JOBS = pytest.mark.parametrize("job", SHARDED)
LOST = "every replica was lost"


def restored_step(outcome: Outcome) -> int:
    """Return the step from which all ranks go on."""
    restored = outcome.records("restored")
    last = max(record["generation"] for record in restored)  # others may be partial
    (step,) = {record["step"] for record in restored if record["generation"] == last}
    return int(step)


def quarantined(outcome: Outcome) -> set[int]:
    """Return the steps of the copies that failed."""
    return {int(record["step"]) for record in outcome.records("quarantined")}


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.slow(tier="peer")
@pytest.mark.promise(
    "bytes of each copy, and its checksum, read back by its node after the act",
    tier="memory",
    job="fsdp",
)
@pytest.mark.promise(
    "`peer` (those that other nodes keep for it; in sharded jobs only)", tier="peer", job="hsdp"
)
@JOBS
@pytest.mark.parametrize("tier", ["memory", "peer"])
def test_the_other_copy_serves(chaos: Chaos, job: str, tier: str) -> None:
    """A rank that tries the damaged one of two copies goes on to the other."""
    faults = [CorruptReplica(rank=2, at_step=AT, tier=tier), Kill(rank=2, at_step=AT)]
    outcome = sharded(chaos, *faults, job=job, copied=True)
    no_damaged_copy_was_taken(outcome)
    assert restored_step(outcome) == AT


@pytest.mark.slow
@pytest.mark.promise("`seal` the checksum by which a copy is known to be complete", how="seal")
@pytest.mark.parametrize("how", ["page", "index", "seal"])
def test_no_good_copy_of_the_newest_step(chaos: Chaos, how: str) -> None:
    """Both copies are damaged and quarantined, and all ranks go back to the step before."""
    faults = [CorruptReplica(rank=2, at_step=AT, tier="both", how=how), Kill(rank=2, at_step=AT)]
    outcome = sharded(chaos, *faults, copied=True)
    no_damaged_copy_was_taken(outcome)
    assert quarantined(outcome) == {AT}
    assert restored_step(outcome) == AT - 1
    assert outcome.lost_steps == 1


def test_a_replica_of_the_piece_serves(chaos: Chaos) -> None:
    """HSDP: another rank holds the same piece, and has copies of its own."""
    faults = [CorruptReplica(rank=2, at_step=AT, tier="both", older=True), Kill(rank=2, at_step=AT)]
    outcome = sharded(chaos, *faults, job="hsdp", copied=True)
    no_damaged_copy_was_taken(outcome)
    assert restored_step(outcome) == AT


@pytest.mark.promise("A copy whose checksum is not the sealed one is never trained on.")
def test_no_good_copy_at_all(chaos: Chaos) -> None:
    """The job ends, with the reason; it does not train on from damaged copies."""
    faults = [CorruptReplica(rank=2, at_step=AT, tier="both", older=True), Kill(rank=2, at_step=AT)]
    outcome = ends(chaos, *faults)
    assert any(LOST in reason for reason in outcome.reasons)
    assert quarantined(outcome) == {AT - 1, AT}
    assert len(outcome.steps) == AT


@pytest.mark.promise(
    "A copy that fails its checksum is journalled and never taken again.",
    how="bit",
    job="gpt",
    copies="every_step",
)
@pytest.mark.parametrize("job", ["gpt", "resnet"])
@pytest.mark.parametrize("how", ["bit", "index"])
@pytest.mark.parametrize("copies", ["every_step", "affordable"])
def test_a_damaged_replica(chaos: Chaos, job: str, how: str, copies: str) -> None:
    """Every worker is lost when a copy of an agent is damaged: no worker reads that copy."""
    faults = [
        CorruptReplica(rank=0, at_step=AT, how=how),
        *(Kill(rank=rank, at_step=AT, phase="reduce") for rank in range(4)),
    ]
    plan: dict[str, Any] = {
        "nodes": 4,
        "spares": 0,
        "steps": 20,
        "memory_copies": 2,
        "copies": copies,
    }
    outcome = chaos.run(job, options={"size": "tiny"}, faults=faults, **plan)
    outcome.assert_same_losses_as_twin()
    no_damaged_copy_was_taken(outcome)


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "the copies are made again; until then the step counts as unprotected", job="fsdp"
)
@JOBS
def test_partners_that_drop_their_copies_get_them_again(chaos: Chaos, job: str) -> None:
    """No rank is given up, no step is lost.

    The state does not count as safe until the copies exist again.
    """
    outcome = sharded(chaos, LosePeerCopy(rank=1, at_step=AT), job=job, goal=copied_again(chaos))
    assert outcome.lost_steps == 0
    assert outcome.records("detected") == []
    events = [
        record.event
        for record in outcome.records("exposed", "protected")
        if record["piece"] == 1 % (4 if job == "fsdp" else 2)
    ]
    assert "protected" in events[events.index("exposed") :]


@pytest.mark.promise("the nodes that had copies are asked for them, and have none", job="hsdp")
@JOBS
def test_a_rank_whose_partners_have_nothing(chaos: Chaos, job: str) -> None:
    """The copy of its own node serves, or a copy that its partners got again meanwhile."""
    outcome = sharded(
        chaos, LosePeerCopy(rank=1, at_step=AT), Kill(rank=1, at_step=AT), job=job, copied=True
    )
    assert restored_step(outcome) == AT


@pytest.mark.slow
@pytest.mark.promise("With a `Kill` of the rank nothing of its piece is left.")
def test_both_copies_at_once(chaos: Chaos) -> None:
    """No memory has the piece, and there is no other tier."""
    outcome = ends(chaos, LosePeerCopy(rank=1, at_step=AT, own=True), Kill(rank=1, at_step=AT))
    assert any(LOST in reason for reason in outcome.reasons)


def test_both_copies_at_once_and_a_replica(chaos: Chaos) -> None:
    """HSDP: the other rank with this piece has copies of its own."""
    sharded(chaos, LosePeerCopy(rank=1, at_step=AT, own=True), Kill(rank=1, at_step=AT), job="hsdp")


# -- poison ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "a sharded job goes back to the last state of which every piece is sound",
    where="optimizer",
    job="fsdp",
)
@JOBS
@pytest.mark.parametrize(("where", "steps"), [("weight", 1), ("optimizer", 2)])
def test_a_poisoned_state_is_not_published(chaos: Chaos, job: str, where: str, steps: int) -> None:
    """The rank is found one or two steps later, and all go back to the last sound state.

    With HSDP the rank that holds the same piece has it sound, and shows that they differ in the
    next step.
    """
    fault = PoisonSnapshot(rank=2, at_step=AT, parameter="head.weight", where=where)
    outcome = sharded(chaos, fault, job=job, max_lost_steps=steps)
    refused = [
        record for record in outcome.records("copy_failed") if "poisoned" in record["reason"]
    ]
    assert refused[0]["step"] == AT + 1
    sound = AT if job == "fsdp" else AT + 1
    assert {record["step"] for record in outcome.records("restored")} == {sound}
    assert {record["worker"] for record in outcome.records("detected")} == {refused[0]["worker"]}


@pytest.mark.promise(
    "no copy of it is published in any tier; the next step finds the rank, which is replaced",
    rank=1,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_poisoned_replica(chaos: Chaos, rank: int) -> None:
    """Other ranks have the state, so no step is lost; its own node keeps no copy of it."""
    fault = PoisonSnapshot(rank=rank, at_step=AT, parameter="head.weight")
    plan: dict[str, Any] = {
        "nodes": 4,
        "spares": 1,
        "steps": 20,
        "memory_copies": 2,
        "copies": "every_step",
    }
    outcome = chaos.run("gpt", options={"size": "tiny"}, faults=[fault], **plan)
    outcome.assert_same_losses_as_twin()
    assert outcome.lost_steps == 0
    (struck,) = {record["worker"] for record in outcome.records("injected")}
    failed = {
        record["reason"].split(":")[0]
        for record in outcome.records("copy_failed")
        if record["worker"] == struck
    }
    assert failed
    assert failed <= {"Poisoned", "Torn"}  # Torn: the rank was found during the copy
