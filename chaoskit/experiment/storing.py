"""What a launcher waits for when the job has ended: the state with which it ended is still being stored."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.experiment.conductor import Watch
from chaoskit.journal import read_tail
from chaoskit.substrate.base import Cluster
from chaoskit.vocabulary import Event

_LOOK_S = 0.02
_SILENCE_S = 1.0  # what is stored sooner is not worth a line
_LINE_EVERY_S = 5.0
_NO_WORD = "the node that commits it ended before it could say why; see its log"


@dataclass(frozen=True, slots=True)
class Storing:
    """The launcher waits for the state of the last step.

    Args:
        tier: the one to which it is written now.
        written_bytes: of it, on the disk; of what is uploaded nothing is known here.
    """

    step: int
    tier: str
    target: str
    written_bytes: int


def await_last(cluster: Cluster, node: str, config: RunConfig, directory: Path, limit_s: float, watch: Watch) -> None:
    """Wait until a node has ended by itself: it does when it has stored the state, or has given that up.

    Args:
        node: the one that commits the snapshot.
        directory: of the run.
        watch: told now and then what is waited for.
    """
    began_s, step = time.monotonic(), last_step(directory / "journal")
    line_s = began_s + _SILENCE_S
    while cluster.node(node) and (now_s := time.monotonic()) < began_s + limit_s:
        if now_s >= line_s:
            line_s = now_s + _LINE_EVERY_S
            watch(_progress(config, step))
        time.sleep(_LOOK_S)


def _progress(config: RunConfig, step: int) -> Storing:
    from chaoskit.checkpoint.disk import DiskTier  # with torch, which takes seconds: here, since launchers wait anyway

    assert config.disk is not None
    disk, written_bytes = DiskTier(config.disk.target), 0
    with contextlib.suppress(OSError):  # the disk may be what is slow, or fails
        if config.remote is not None and disk.holds(step):
            return Storing(step, "remote", config.remote.target, 0)
        written_bytes = disk.staged_bytes(step)
    return Storing(step, "disk", config.disk.target, written_bytes)


def last_step(journals: Path) -> int:
    """With which a job has ended."""
    return max((record["step"] for record in read_tail(journals) if record.event == Event.FINISHED), default=0)


def why_not_stored(config: RunConfig, journals: Path) -> str:
    """Why the state of the last step is not in every tier of a job that has ended well; "" if it is."""
    step = last_step(journals)
    records = [record for record in read_tail(journals) if record.event in (Event.SAVED, Event.SAVE_FAILED)]
    for name, tier in (("disk", config.disk), ("remote", config.remote)):
        told = [record for record in records if (record["tier"], record["step"]) == (name, step)]
        saved = any(record.event == Event.SAVED for record in told)
        if tier is None or saved or (name == "disk" and _holds(tier.target, step)):  # that of an earlier run may serve
            continue
        reasons = [str(record["reason"]) for record in told]
        return f"step {step} is not in {tier.target}: {reasons[-1] if reasons else _NO_WORD}"
    return ""


def _holds(target: str, step: int) -> bool:
    from chaoskit.checkpoint.disk import DiskTier

    try:
        return DiskTier(target).holds(step)
    except OSError:
        return False
