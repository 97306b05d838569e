"""Faults of the disk of a node: it is full, slow, read-only, or fails now and then.

-> substrate/disk/process.py is the file system that refuses or delays; disks.py mounts it.
-> daemon/saving.py: what the job does when a snapshot cannot be stored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
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

#: Word that stands for the directory of the run's snapshots.
CHECKPOINTS = "checkpoints"
_UNLISTED = "the tables count what ends a job; a disk that fails a checkpoint mostly ends only that"
_IMPACT = "the job's own errors; a job that bears them goes on"
_UNDO = "nothing is left: the file system that stands before the directory is the node's own"
#: The job must write to the disk, or no process meets the fault.
_EXAMPLE = 'chaos.run("gpt", nodes=4, steps=60, options={{"save_every": 5}}, faults=[{fault}])'


@dataclass(frozen=True, kw_only=True)
class TroubledDirectory:
    """A directory of the rank's node, and the duration of the trouble with it.

    These are the parameters that disk faults add to those of a fault. Files that are open
    when the fault strikes are not troubled; files that are opened from then on are.

    Args:
        directory: absolute; without one, the node's own, which jobs know as ``trainer.disk``.
            ``checkpoints``: that of the run's disk tier, so that the next save meets it; no
            training may end for that.
        heal_after_s: the trouble ends so many seconds after the first operation that it refused or
            delayed. It lasts until the end of the run for None, or if it meets no operation.
    """

    directory: str = ""
    heal_after_s: float | None = None

    def validate_directory(self) -> None:
        """Raise BadInput unless the directory exists and its path is absolute."""
        named = self.directory not in ("", CHECKPOINTS)
        if named and not Path(self.directory).is_dir():
            remedy = "use a directory that is there, 'checkpoints', or none for trainer.disk"
            raise BadInput("directory", self.directory, remedy)
        if named and not Path(self.directory).is_absolute():
            raise BadInput("directory", self.directory, "use an absolute path")
        if self.heal_after_s is not None:
            require_seconds("heal_after_s", self.heal_after_s, above_0=True)

    def require_directory(self, kind: str, config: RunConfig) -> None:
        """Raise BadInput if the directory is that of the disk tier, and the run has none.

        Args:
            kind: name of the fault, for the remedy.
        """
        if self.directory == CHECKPOINTS and config.disk is None:
            raise BadInput(
                "disk", config.disk, f"store snapshots, or give {kind} another directory"
            )

    def path(self, target: Target) -> Path:
        """Return the path of the directory on the target's node."""
        if (
            self.directory == CHECKPOINTS
            and target.config is not None
            and target.config.disk is not None
        ):
            return Path(target.config.disk.target)
        return Path(self.directory) if self.directory else target.cluster.disk(target.node)


@dataclass(frozen=True, kw_only=True)
class DiskFull(TroubledDirectory, Fault):
    """Let a disk become full.

    Args:
        room_bytes: number of bytes that can still be written.
    """

    room_bytes: int = 0

    family: ClassVar[str] = "disk"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (BreakDisk,)
    effect: ClassVar[str] = "nothing more can be written to a directory of one node"
    evidence: ClassVar[str] = "writes that the file system has refused with ENOSPC"
    stands_for: ClassVar[str] = "disks that checkpoints, logs and core dumps have filled"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.DISK_FULL,)
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker")
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.disks()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_directory()
        if self.room_bytes < 0:
            raise BadInput("room_bytes", self.room_bytes, "use a number of bytes, 0 or more")

    def require(self, config: RunConfig) -> None:
        self.require_directory(self.kind, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(met: int) -> str:
            return f"the disk of {target.node} has refused {met} writes with ENOSPC"

        trouble = Full(self.room_bytes)
        return _break_disk(target, self.path(target), trouble, in_words, self.heal_after_s)


@dataclass(frozen=True, kw_only=True)
class ReadOnlyDisk(TroubledDirectory, Fault):
    """Refuse all changes of a disk."""

    family: ClassVar[str] = "disk"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (BreakDisk,)
    effect: ClassVar[str] = "nothing can be changed in a directory of one node"
    evidence: ClassVar[str] = "changes that the file system has refused with EROFS"
    stands_for: ClassVar[str] = "file systems that the kernel made read-only after an error"
    unlisted: ClassVar[str] = _UNLISTED
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker")
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.disks()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_directory()

    def require(self, config: RunConfig) -> None:
        self.require_directory(self.kind, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(met: int) -> str:
            return f"the disk of {target.node} has refused {met} changes with EROFS"

        trouble = ReadOnly()
        return _break_disk(target, self.path(target), trouble, in_words, self.heal_after_s)


@dataclass(frozen=True, kw_only=True)
class SlowDisk(TroubledDirectory, Fault):
    """Let all operations of a disk take longer.

    Args:
        delay_ms: milliseconds that are added to each operation.
        bytes_per_s: the rate at which it reads and writes at most; 0 leaves that as it is.
    """

    delay_ms: float = 50.0
    bytes_per_s: float = 0.0

    family: ClassVar[str] = "disk"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = HUNG_CAUSES | {"slow"}
    needs: ClassVar[tuple[type[Action], ...]] = (BreakDisk,)
    effect: ClassVar[str] = (
        "whatever is read from, or written to, a directory of one node takes longer"
    )
    evidence: ClassVar[str] = "operations that the file system has held up"
    stands_for: ClassVar[str] = "disks that wear out, and shared file systems at their limit"
    impact: ClassVar[str] = "the job waits; no rank may be given up for it"
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "delay_ms": 20.0}
    unlisted: ClassVar[str] = _UNLISTED
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker")
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.disks()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_directory()
        if self.delay_ms < 0 or self.bytes_per_s < 0:
            field = "delay_ms" if self.delay_ms < 0 else "bytes_per_s"
            raise BadInput(field, getattr(self, field), "use 0 or more")
        if not self.delay_ms and not self.bytes_per_s:
            raise BadInput(
                "delay_ms",
                self.delay_ms,
                "use more than 0, or give bytes_per_s: otherwise nothing is slow",
            )

    def require(self, config: RunConfig) -> None:
        self.require_directory(self.kind, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(met: int) -> str:
            return f"the disk of {target.node} has held up {met} operations"

        trouble = Slow(self.delay_ms, self.bytes_per_s)
        return _break_disk(target, self.path(target), trouble, in_words, self.heal_after_s)


@dataclass(frozen=True, kw_only=True)
class DiskError(TroubledDirectory, Fault):
    """Let a disk fail with input/output errors.

    Args:
        operations: kinds that fail: ``read``, ``write``, ``change`` (make, remove, rename,
            truncate), ``sync``.
        share: share of them that fail, above 0 and up to 1, drawn for each.
    """

    operations: tuple[Operation, ...] = OPERATIONS
    share: float = 1.0

    family: ClassVar[str] = "disk"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (BreakDisk,)
    effect: ClassVar[str] = "what is asked of a directory of one node fails, always or now and then"
    evidence: ClassVar[str] = "operations that the file system has failed with EIO"
    stands_for: ClassVar[str] = "broken disks and lost connections to storage"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SSD, incidents.DISK_FAULT)
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker")
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.disks()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_directory()
        if not self.operations or set(self.operations) - set(OPERATIONS):
            raise BadInput("operations", self.operations, f"use some of {', '.join(OPERATIONS)}")
        if not 0 < self.share <= 1:
            raise BadInput("share", self.share, "use a share above 0, and at most 1")

    def require(self, config: RunConfig) -> None:
        self.require_directory(self.kind, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(met: int) -> str:
            return f"the disk of {target.node} has failed {met} operations with EIO"

        trouble = Failing(tuple(self.operations), self.share)
        return _break_disk(target, self.path(target), trouble, in_words, self.heal_after_s)


async def _break_disk(
    target: Target,
    directory: Path,
    trouble: Trouble,
    in_words: Callable[[int], str],
    heal_after_s: float | None,
) -> AsyncGenerator[Evidence]:
    """Trouble a directory of the target's node, and yield evidence once an operation meets that.

    If none meets it, there is no evidence, and it lasts until the run ends.

    Args:
        in_words: returns the number of troubled operations in words.
        heal_after_s: seconds after the first troubled operation; None: until the run ends.
    """
    target.struck_nodes = {target.node}
    with target.applied(BreakDisk(directory, trouble)) as broken:
        target.release()
        source = "the file system before the directory"
        yield await target.counted(broken, target.whole_node, source, in_words)
        if heal_after_s is None:
            await target.until_end()
        else:
            await target.sleep(heal_after_s)
    target.lifted()
