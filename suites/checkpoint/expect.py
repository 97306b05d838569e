"""Runs in which copies are struck, and expectations on their journals.

-> suites/checkpoint/jobs.py has the job that waits for complete copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaoskit import Chaos, Harness, Outcome, Record
from chaoskit.faults import Fault
from chaoskit.runlog.redundancy import windows
from chaoskit.suites.goals import JournalFlag

AT = 8  # the step in which faults strike
TINY: dict[str, Any] = {"size": "tiny"}
#: Jobs with the state in pieces: each piece once, and each piece twice.
SHARDED: dict[str, dict[str, Any]] = {"fsdp": TINY, "hsdp": TINY | {"replicas": 2}}


#: Job that waits in step ``AT`` until all copies are complete, before faults strike in that step.
COPIED = f"{Path(__file__).with_name('jobs.py')}:copied"


def sharded(
    chaos: Chaos,
    *faults: Fault,
    job: str = "fsdp",
    copied: bool = False,
    goal: JournalFlag | None = None,
    **plan: Any,
) -> Outcome:
    """Run a sharded job on four nodes, which must end with the twin's bits.

    One step may be lost for each fault, unless ``plan`` says otherwise. Return the outcome.

    Args:
        job: ``fsdp``, or ``hsdp`` for pieces that two ranks hold.
        copied: run the job ``COPIED``.
        goal: goal of an open-ended run.
        plan: further fields of the plan.
    """
    settings = _copied(job, plan) if copied else {"job": "fsdp", **_settings(job, plan)}
    if goal is not None:
        settings |= {"until": goal.until, "watch": goal, "deadline_s": 240.0}
        settings["options"] = settings["options"] | {"schedule_steps": 40}
    outcome = chaos.run(faults=faults, **settings)
    outcome.assert_same_losses_as_twin()
    return outcome


def ends(chaos: Chaos, *faults: Fault, job: str = "fsdp", **plan: Any) -> Outcome:
    """Run the job ``COPIED`` where it may be unable to go on, and return its outcome.

    The verdict of the run is ignored: a good end is not promised.
    """
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
    """Return the goal of a run in which pieces lacked copies, and have them again."""
    records: list[Record] = []

    def are_copied(record: Record) -> bool:
        records.append(record)
        exposures = (
            windows(sorted(records, key=lambda earlier: earlier.t_ns), 1)
            if record.event == "protected"
            else []
        )
        return bool(exposures) and exposures[-1].ended_ns is not None

    return JournalFlag(chaos, are_copied)


def all_copied(chaos: Chaos, nodes: int) -> JournalFlag:
    """Return the goal of a run in which the pieces of as many workers as ``nodes`` have copies."""
    owners: set[str] = set()

    def are_copied(record: Record) -> bool:
        owners.update([record["worker"]] if record.event == "protected" else [])
        return len(owners) >= nodes

    return JournalFlag(chaos, are_copied)


def uploaded_after(chaos: Chaos | Harness, event: str) -> JournalFlag:
    """Return the goal that a snapshot is uploaded after this event.

    It must be of a later step than that of the event, if the event has one.
    """
    since: list[Record] = []
    uploads: list[Record] = []

    def is_uploaded(record: Record) -> bool:
        since.extend([record] if record.event == event else [])
        uploads.extend([record] if record.event == "saved" and record["tier"] == "remote" else [])
        return any(
            upload.t_ns > begin.t_ns and upload["step"] > begin.get("step", -1)
            for begin in since
            for upload in uploads
        )

    return JournalFlag(chaos, is_uploaded)


def damaged(outcome: Outcome) -> set[str]:
    """Return the first digits of the checksums of damaged copies, as the nodes read them back."""
    texts = [evidence.observed for fault in outcome.faults for evidence in fault.evidence]
    return {part.split()[0].rstrip(";") for text in texts for part in text.split(", now ")[1:]}


def no_damaged_copy_was_taken(outcome: Outcome) -> None:
    """Assert that each restored copy has the checksum of its seal, and none is damaged."""
    # "" stands for a live replica
    taken = {record["checksum"] for record in outcome.records("restored")} - {""}
    assert taken
    assert taken <= {record["checksum"] for record in outcome.records("sealed")}
    assert not [checksum for checksum in taken if checksum[:8] in damaged(outcome)]
