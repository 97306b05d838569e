"""Wait of a launcher for the last state of a job, which may still be stored after the job has
ended.

-> coordinator/schedules/save_schedule.py: which states nodes store during a run.
daemon/saving.py and checkpoint/remote/uploader.py: a save or an upload that fails.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from chaoskit.checkpoint.disk.due_steps import LAST_PATIENCE_S, Patience
from chaoskit.config import CheckpointTier, RunConfig
from chaoskit.experiment.injection.job_follower import Watch
from chaoskit.journal import read_tail
from chaoskit.process.host_checks import answer_within, on_thread
from chaoskit.substrate.core.base import Cluster
from chaoskit.vocabulary import Event

_POLL_S = 0.02
_SILENCE_S = 1.0  # no progress line for a state that is stored sooner
_LINE_EVERY_S = 5.0
_ANSWER_S = 1.0  # time limit of the disk for each of these lines
_DISK_ANSWER_S = 5.0  # time limit of the disk in the end
# longer than the patience of the node, which knows the reason
_NODE_PATIENCE_S = LAST_PATIENCE_S + 30.0
_NO_REASON = "the node that commits it ended without a record of the reason; see its log"


@dataclass(frozen=True, slots=True)
class Storing:
    """Live-view message: the launcher waits until the state of the last step is stored.

    Attributes:
        step: the last step.
        tier: the tier to which the state is being written.
        target: the target of that tier.
        written_bytes: bytes on the disk so far; 0 for an upload, whose progress is not known.
        answers: the disk answered within its time limit.
    """

    step: int
    tier: str
    target: str
    written_bytes: int
    answers: bool = True


def await_last(
    cluster: Cluster,
    node: str,
    disk: CheckpointTier,
    remote: CheckpointTier | None,
    directory: Path,
    limit_s: float,
    watch: Watch,
    *,
    patience_s: float = _NODE_PATIENCE_S,
) -> str:
    """Wait until a node ends by itself, after it has stored the last state or has given up.

    Args:
        cluster: the cluster of the run.
        node: the node that commits the snapshot.
        disk: the disk tier of the run.
        remote: the tier to which snapshots of the disk tier are uploaded, or None.
        directory: the directory of the run.
        limit_s: the time limit of the wait, in seconds.
        watch: receives a :class:`Storing` message now and then.
        patience_s: the time limit in seconds without any byte written. An upload that is under way
            counts as progress. The node itself has less, but a node with a hung disk may never end.

    Returns:
        The reason why the wait was given up; empty if the node has ended. Then the state may still
        be missing: see :func:`why_not_stored`.
    """
    began_s = time.monotonic()
    probe, patience = _Probe(disk, remote, last_step(directory / "journal")), Patience(patience_s)
    next_line_s = began_s + _SILENCE_S
    while cluster.node(node):
        now_s = time.monotonic()
        if now_s >= began_s + limit_s:
            return "it was not stored before the deadline of the run"
        if now_s >= next_line_s:
            next_line_s = now_s + _LINE_EVERY_S
            watch(probe.look(min(_ANSWER_S, began_s + limit_s - now_s)))
            if patience.is_over(probe.progress_count, time.monotonic()):
                return f"nothing of it was written for {patience_s:g} s, and its node did not end"
        time.sleep(_POLL_S)
    return ""


class _Probe:
    """Progress of the last state.

    A disk that hangs blocks the thread of a look only, so there is one look at a time.

    Attributes:
        progress_count: a number that grows with the bytes on the disk, and with each look at an
            upload.
    """

    def __init__(self, disk: CheckpointTier, remote: CheckpointTier | None, step: int) -> None:
        self._disk, self._remote, self._step, self.progress_count = disk, remote, step, 0
        self._pending_look: Future[Storing] | None = None

    def look(self, limit_s: float) -> Storing:
        """Return the progress on disk, or that the disk does not answer within ``limit_s``.

        Progress also raises :attr:`progress_count`.
        """
        # imports torch, which takes seconds: outside the disk's time limit
        import chaoskit.checkpoint.disk.tier  # noqa: F401

        self._pending_look = self._pending_look or on_thread(
            lambda: _progress(self._disk, self._remote, self._step)
        )
        try:
            progress, self._pending_look = self._pending_look.result(limit_s), None
        except TimeoutError:
            return Storing(self._step, "disk", self._disk.target, 0, answers=False)
        self.progress_count = max(
            self.progress_count + (progress.tier == "remote"), progress.written_bytes
        )
        return progress


def _progress(disk: CheckpointTier, remote: CheckpointTier | None, step: int) -> Storing:
    """Return how much of a step is on disk; if all of it is, that it is being uploaded.

    A disk that fails counts as one without any byte of it.
    """
    from chaoskit.checkpoint.disk.tier import DiskTier

    tier, written_bytes = DiskTier(disk.target), 0
    with contextlib.suppress(OSError):  # the disk may fail
        if remote is not None and tier.holds(step):
            return Storing(step, "remote", remote.target, 0)
        written_bytes = tier.staged_bytes(step)
    return Storing(step, "disk", disk.target, written_bytes)


def last_step(journals: Path) -> int:
    """Return the step with which a job has ended, by the newest records of ranks that finished.

    It is 0 if none shows it.
    """
    return max(
        (record["step"] for record in read_tail(journals) if record.event == Event.FINISHED),
        default=0,
    )


def why_not_stored(config: RunConfig, journals: Path) -> str:
    """Return why a tier lacks the last state of a job that ended well; "" if every tier has it.

    Only the tiers of ``config`` count. The first tier that lacks it is named.
    """
    step = last_step(journals)
    records = [
        record for record in read_tail(journals) if record.event in (Event.SAVED, Event.SAVE_FAILED)
    ]
    for name, tier in (("disk", config.disk), ("remote", config.remote)):
        attempts = [
            record for record in records if (record["tier"], record["step"]) == (name, step)
        ]
        is_saved = any(record.event == Event.SAVED for record in attempts)
        # a snapshot of an earlier run may serve, too
        if tier is None or is_saved or (name == "disk" and _holds(tier.target, step)):
            continue
        reasons = [str(record["reason"]) for record in attempts]
        return f"step {step} is not in {tier.target}: {reasons[-1] if reasons else _NO_REASON}"
    return ""


def _holds(target: str, step: int) -> bool:
    """Return whether a disk has a snapshot of a step; False if it fails or does not answer."""
    from chaoskit.checkpoint.disk.tier import DiskTier

    try:
        return answer_within(_DISK_ANSWER_S, lambda: DiskTier(target).holds(step))
    except OSError:
        return False
