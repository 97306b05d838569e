"""The disk of a node goes wrong: it is full, slow, read-only, or fails now and then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, BreakDisk
from chaoskit.substrate.core.disk import (
    OPERATIONS,
    Failing,
    Full,
    Operation,
    ReadOnly,
    Slow,
    Trouble,
)
from chaoskit.substrate.limits import capabilities
from chaoskit.vocabulary import FAILED_CAUSES, HUNG_CAUSES

#: In place of a directory: that in which the run's snapshots are stored.
CHECKPOINTS = "checkpoints"
_UNLISTED = "the tables count what ends a job; a disk that fails a checkpoint mostly ends only that"


@dataclass(frozen=True, kw_only=True)
class DiskFault(Fault):
    """Base of the faults that trouble a directory, as the processes of the rank's node see it.

    Files that they have open at that moment are not troubled; whatever they open from then on is.

    Args:
        directory: absolute; without one, the node's own, which jobs know as ``trainer.disk``. ``checkpoints``: that of
            the run's disk tier, so that the next save meets it; no training may end for that.
        heal_after_s: when it ends, counted from the first operation that it meets; None: with the run.
    """

    directory: str = ""
    heal_after_s: float | None = None

    family: ClassVar[str] = "disk"
    whole_node: ClassVar[bool] = True
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker")
    impact: ClassVar[str] = "the job's own errors; a job that bears them goes on"
    unlisted: ClassVar[str] = _UNLISTED
    #: No process meets a disk to which the job does not write.
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, options={{"save_every": 5}}, faults=[{fault}])'
    )
    undo: ClassVar[str] = (
        "nothing is left: the file system that stands before the directory is the node's own"
    )

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.disks()

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (BreakDisk,)

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return FAILED_CAUSES

    @property
    def trouble(self) -> Trouble:
        """What is wrong with the disk."""
        raise NotImplementedError

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        named = self.directory not in ("", CHECKPOINTS)
        if named and not Path(self.directory).is_dir():
            remedy = "use a directory that is there, 'checkpoints', or none for trainer.disk"
            raise BadInput("directory", self.directory, remedy)
        if named and not Path(self.directory).is_absolute():
            raise BadInput("directory", self.directory, "use an absolute path")
        if self.heal_after_s is not None:
            require_seconds("heal_after_s", self.heal_after_s, above_0=True)

    def require(self, config: RunConfig) -> None:
        if self.directory == CHECKPOINTS and config.disk is None:
            raise BadInput(
                "disk", config.disk, f"store snapshots, or give {self.kind} another directory"
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        directory = Path(self.directory) if self.directory else target.cluster.disk(target.node)
        if (
            self.directory == CHECKPOINTS
            and target.config is not None
            and target.config.disk is not None
        ):
            directory = Path(target.config.disk.target)
        target.struck_nodes = {target.node}
        with target.applied(BreakDisk(directory, self.trouble)) as broken:
            target.release()

            source = "the file system before the directory"
            yield await target.counted(
                broken,
                target.whole_node,
                source,
                lambda met: f"the disk of {target.node} {self.shown(met)}",
            )
            if self.heal_after_s is None:
                await target.until_end()
            else:
                await target.sleep(self.heal_after_s)
        target.lifted()

    def shown(self, met: int) -> str:
        """What the disk did, in words, to so many operations."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DiskFull(DiskFault):
    """Let a disk run full.

    Args:
        room_bytes: what can be written before.
    """

    room_bytes: int = 0

    effect: ClassVar[str] = "nothing more can be written to a directory of one node"
    evidence: ClassVar[str] = "writes that the file system has refused with ENOSPC"
    stands_for: ClassVar[str] = "disks that checkpoints, logs and core dumps have filled"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.DISK_FULL,)
    unlisted: ClassVar[str] = ""

    @property
    def trouble(self) -> Trouble:
        return Full(self.room_bytes)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.room_bytes < 0:
            raise BadInput("room_bytes", self.room_bytes, "use a number of bytes, 0 or more")

    def shown(self, met: int) -> str:
        return f"has refused {met} writes with ENOSPC"


@dataclass(frozen=True, kw_only=True)
class ReadOnlyDisk(DiskFault):
    """Let nothing be changed on a disk any more."""

    effect: ClassVar[str] = "nothing can be changed in a directory of one node"
    evidence: ClassVar[str] = "changes that the file system has refused with EROFS"
    stands_for: ClassVar[str] = "file systems that the kernel made read-only after an error"

    @property
    def trouble(self) -> Trouble:
        return ReadOnly()

    def shown(self, met: int) -> str:
        return f"has refused {met} changes with EROFS"


@dataclass(frozen=True, kw_only=True)
class SlowDisk(DiskFault):
    """Let everything that is asked of a disk take longer.

    Args:
        delay_ms: added to each operation.
        bytes_per_s: the rate at which it reads and writes at most; 0 leaves that as it is.
    """

    delay_ms: float = 50.0
    bytes_per_s: float = 0.0

    effect: ClassVar[str] = (
        "whatever is read from, or written to, a directory of one node takes longer"
    )
    evidence: ClassVar[str] = "operations that the file system has held up"
    stands_for: ClassVar[str] = "disks that wear out, and shared file systems at their limit"
    impact: ClassVar[str] = "the job waits; no rank may be given up for it"
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "delay_ms": 20.0}

    @property
    def trouble(self) -> Trouble:
        return Slow(self.delay_ms, self.bytes_per_s)

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | {"slow"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.delay_ms < 0 or self.bytes_per_s < 0:
            field = "delay_ms" if self.delay_ms < 0 else "bytes_per_s"
            raise BadInput(field, getattr(self, field), "use 0 or more")
        if not self.delay_ms and not self.bytes_per_s:
            raise BadInput(
                "delay_ms", self.delay_ms, "use more than 0, or a rate: as it is, nothing is slow"
            )

    def shown(self, met: int) -> str:
        return f"has held up {met} operations"


@dataclass(frozen=True, kw_only=True)
class DiskError(DiskFault):
    """Let a disk fail with input/output errors.

    Args:
        operations: which fail: ``read``, ``write``, ``change`` (make, remove, rename, truncate), ``sync``.
        share: of them that fail, drawn for each.
    """

    operations: tuple[Operation, ...] = OPERATIONS
    share: float = 1.0

    effect: ClassVar[str] = "what is asked of a directory of one node fails, always or now and then"
    evidence: ClassVar[str] = "operations that the file system has failed with EIO"
    stands_for: ClassVar[str] = "broken disks and lost connections to storage"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SSD, incidents.DISK_FAULT)
    unlisted: ClassVar[str] = ""

    @property
    def trouble(self) -> Trouble:
        return Failing(tuple(self.operations), self.share)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not self.operations or set(self.operations) - set(OPERATIONS):
            raise BadInput("operations", self.operations, f"use some of {', '.join(OPERATIONS)}")
        if not 0 < self.share <= 1:
            raise BadInput("share", self.share, "use a share above 0, and at most 1")

    def shown(self, met: int) -> str:
        return f"has failed {met} operations with EIO"
