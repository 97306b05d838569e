"""Runs whose copies are struck, and what their journals must say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaoskit import Chaos, Harness, Outcome, Record
from chaoskit.faults import Fault
from chaoskit.runlog.redundancy import windows
from chaoskit.suites.goals import JournalFlag

AT = 8  # the step in which faults strike
TINY: dict[str, Any] = {"size": "tiny"}
#: Jobs whose state is in pieces: each piece once, and each piece twice.
SHARDED: dict[str, dict[str, Any]] = {"fsdp": TINY, "hsdp": TINY | {"replicas": 2}}


#: In a run of this job all copies of the state before step ``AT`` are complete when faults strike in that step.
COPIED = f"{Path(__file__).with_name('jobs.py')}:copied"


def sharded(
    chaos: Chaos,
    *faults: Fault,
    job: str = "fsdp",
    copied: bool = False,
    goal: JournalFlag | None = None,
    **plan: Any,
) -> Outcome:
    """A sharded job on four nodes that ends with the twin's bits; one step may be lost.

    Args:
        copied: see ``COPIED``.
        goal: of an open-ended run, which goes on until it is reached.
    """
    settings = _copied(job, plan) if copied else {"job": "fsdp", **_settings(job, plan)}
    if goal is not None:
        settings |= {"until": goal.until, "watch": goal, "deadline_s": 240.0}
        settings["options"] = settings["options"] | {"schedule_steps": 40}
    outcome = chaos.run(faults=faults, **settings)
    outcome.assert_same_losses_as_twin()
    return outcome


def ends(chaos: Chaos, *faults: Fault, job: str = "fsdp", **plan: Any) -> Outcome:
    """A sharded job that cannot go on. The run's own verdict is not asked: that it ends well is not promised."""
    return chaos.harness.run(faults=list(faults), twin=False, **chaos.limits | _copied(job, plan))


def _copied(job: str, plan: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in SHARDED[job].items() if name == "replicas"}
    return {
        "job": COPIED,
        "nodes": 4,
        "spares": 1,
        "steps": 20,
        "until": {"copied_at": AT},
        "options": options,
    } | plan


def _settings(job: str, plan: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": 4, "spares": 1, "steps": 20, "options": SHARDED[job]} | plan


def copied_again(chaos: Chaos) -> JournalFlag:
    """The goal of a run in which pieces lacked copies, and have them again."""
    seen: list[Record] = []

    def are_copied(record: Record) -> bool:
        seen.append(record)
        found = (
            windows(sorted(seen, key=lambda one: one.t_ns), 1)
            if record.event == "protected"
            else []
        )
        return bool(found) and found[-1].ended_ns is not None

    return JournalFlag(chaos, are_copied)


def all_copied(chaos: Chaos, nodes: int) -> JournalFlag:
    """The goal of a run in which the pieces of so many nodes have their copies."""
    owners: set[str] = set()

    def are_copied(record: Record) -> bool:
        owners.update([record["worker"]] if record.event == "protected" else [])
        return len(owners) >= nodes

    return JournalFlag(chaos, are_copied)


def uploaded_after(chaos: Chaos | Harness, event: str) -> JournalFlag:
    """The goal that a snapshot was uploaded after this event, and of a later step if that tells of one."""
    since: list[Record] = []
    uploads: list[Record] = []

    def is_uploaded(record: Record) -> bool:
        since.extend([record] if record.event == event else [])
        uploads.extend([record] if record.event == "saved" and record["tier"] == "remote" else [])
        return any(
            up.t_ns > one.t_ns and up["step"] > one.get("step", -1)
            for one in since
            for up in uploads
        )

    return JournalFlag(chaos, is_uploaded)


def damaged(outcome: Outcome) -> set[str]:
    """First digits of the checksums that damaged copies had, as the nodes read them back."""
    told = [evidence.observed for fault in outcome.faults for evidence in fault.evidence]
    return {part.split()[0].rstrip(";") for text in told for part in text.split(", now ")[1:]}


def no_damaged_copy_was_taken(outcome: Outcome) -> None:
    """Each copy that was restored has the checksum with which it was sealed, and none of the damaged ones."""
    taken = {record["checksum"] for record in outcome.records("restored")} - {
        ""
    }  # none: from a live replica
    assert taken
    assert taken <= {record["checksum"] for record in outcome.records("sealed")}
    assert not [checksum for checksum in taken if checksum[:8] in damaged(outcome)]
