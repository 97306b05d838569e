"""What a launcher waits for when the job has ended: the state with which it ended is still being stored."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.coordinator.schedules.save_schedule import LAST_PATIENCE_S, Patience
from chaoskit.experiment.injection.follow import Watch
from chaoskit.journal import read_tail
from chaoskit.process.host_checks import answer_within, on_thread
from chaoskit.substrate.core.base import Cluster
from chaoskit.vocabulary import Event

_LOOK_S = 0.02
_SILENCE_S = 1.0  # what is stored sooner is not worth a line
_LINE_EVERY_S = 5.0
_ANSWER_S = 1.0  # the disk has so long for each of these lines
_DISK_ANSWER_S = 5.0  # and so long in the end
_NODE_PATIENCE_S = LAST_PATIENCE_S + 30.0  # the node that stores gives up first, and says why
_NO_WORD = "the node that commits it ended before it could say why; see its log"


@dataclass(frozen=True, slots=True)
class Storing:
    """The launcher waits for the state of the last step.

    Args:
        tier: the one to which it is written now.
        written_bytes: of it, on the disk; of what is uploaded nothing is known here.
        answers: whether the disk says so now.
    """

    step: int
    tier: str
    target: str
    written_bytes: int
    answers: bool = True


def await_last(
    cluster: Cluster,
    node: str,
    config: RunConfig,
    directory: Path,
    limit_s: float,
    watch: Watch,
    *,
    patience_s: float = _NODE_PATIENCE_S,
) -> str:
    """Wait until a node has ended by itself: it does when it has stored the state, or has given that up.

    Args:
        node: the one that commits the snapshot.
        directory: of the run.
        limit_s: of the wait.
        watch: told now and then what is waited for.
        patience_s: without anything that is written or uploaded. The node itself has less; but one whose disk hangs
            may not come to its end.

    Returns:
        Why it was not waited for any longer; empty if the node has ended.
    """
    began_s = time.monotonic()
    probe, patience = _Probe(config, last_step(directory / "journal")), Patience(patience_s)
    line_s = began_s + _SILENCE_S
    while cluster.node(node):
        now_s = time.monotonic()
        if now_s >= began_s + limit_s:
            return "it was not stored before the deadline of the run"
        if now_s >= line_s:
            line_s = now_s + _LINE_EVERY_S
            watch(probe.look(min(_ANSWER_S, began_s + limit_s - now_s)))
            if patience.is_over(probe.moved, time.monotonic()):
                return f"nothing of it was written for {patience_s:g} s, and its node did not end"
        time.sleep(_LOOK_S)
    return ""


class _Probe:
    """Looks how far the last state is stored, one look at a time: a disk that hangs holds up the thread of one.

    Attributes:
        moved: grows as long as something is written, or uploaded.
    """

    def __init__(self, config: RunConfig, step: int) -> None:
        self._config, self._step, self.moved = config, step, 0
        self._answer: Future[Storing] | None = None

    def look(self, limit_s: float) -> Storing:
        """Return what the disk says now, or that it does not answer in ``limit_s``."""
        import chaoskit.checkpoint.disk.tier  # noqa: F401 - with torch, which takes seconds: not on the disk's account

        assert self._config.disk is not None
        self._answer = self._answer or on_thread(lambda: _progress(self._config, self._step))
        try:
            found, self._answer = self._answer.result(limit_s), None
        except TimeoutError:
            return Storing(self._step, "disk", self._config.disk.target, 0, answers=False)
        self.moved = max(self.moved + (found.tier == "remote"), found.written_bytes)
        return found


def _progress(config: RunConfig, step: int) -> Storing:
    from chaoskit.checkpoint.disk.tier import DiskTier

    assert config.disk is not None
    disk, written_bytes = DiskTier(config.disk.target), 0
    with contextlib.suppress(OSError):  # the disk may be what is slow, or fails
        if config.remote is not None and disk.holds(step):
            return Storing(step, "remote", config.remote.target, 0)
        written_bytes = disk.staged_bytes(step)
    return Storing(step, "disk", config.disk.target, written_bytes)


def last_step(journals: Path) -> int:
    """With which a job has ended."""
    return max(
        (record["step"] for record in read_tail(journals) if record.event == Event.FINISHED),
        default=0,
    )


def why_not_stored(config: RunConfig, journals: Path) -> str:
    """Why the state of the last step is not in every tier of a job that has ended well; "" if it is."""
    step = last_step(journals)
    records = [
        record for record in read_tail(journals) if record.event in (Event.SAVED, Event.SAVE_FAILED)
    ]
    for name, tier in (("disk", config.disk), ("remote", config.remote)):
        told = [record for record in records if (record["tier"], record["step"]) == (name, step)]
        saved = any(record.event == Event.SAVED for record in told)
        if (
            tier is None or saved or (name == "disk" and _holds(tier.target, step))
        ):  # that of an earlier run may serve
            continue
        reasons = [str(record["reason"]) for record in told]
        return f"step {step} is not in {tier.target}: {reasons[-1] if reasons else _NO_WORD}"
    return ""


def _holds(target: str, step: int) -> bool:
    from chaoskit.checkpoint.disk.tier import DiskTier

    try:
        return answer_within(_DISK_ANSWER_S, lambda: DiskTier(target).holds(step))
    except OSError:
        return False
