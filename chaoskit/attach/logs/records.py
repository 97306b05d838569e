"""Records of followed logs: a line, a hole, and the place that both belong to.

-> attach/logs/container_log.py makes the records; attach/logs/files.py stores them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

_UID_DIGITS = 8  # of a UID, which distinguish pods that had the same name


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A container of one pod: the place that lines come from.

    A successor of the pod with the same name is another place, as its UID differs.

    Attributes:
        pod: name of the pod.
        pod_uid: UID of the pod.
        container: name of the container.
    """

    pod: str
    pod_uid: str
    container: str

    @property
    def name(self) -> str:
        """The name of the file of this place, without suffix."""
        return f"{self.pod}.{self.container}.{self.pod_uid[:_UID_DIGITS]}"


@dataclass(frozen=True, slots=True)
class ContainerLife:
    """A life of a container: the time from a start to the next end.

    Attributes:
        number: number of restarts before this life.
        container_id: ID of the container at its runtime, such as ``containerd://3f...``.
        started_s: time of its start by the node's clock, in whole seconds since the epoch; 0 if it
            is not known.
    """

    number: int
    container_id: str
    started_s: int = field(default=0, compare=False)


class ContainerLine(msgspec.Struct, frozen=True):
    """A line that a container has printed.

    Attributes:
        place: the container.
        life: the life in which the line was printed.
        node_time: time of the line by the node's clock, in RFC 3339 with nanoseconds.
        node_ns: the same time in nanoseconds since the epoch.
        t_ns: time of arrival on the monotonic clock of this machine.
        content: the line without its line break.
    """

    place: LogPlace
    life: ContainerLife
    node_time: str
    node_ns: int
    t_ns: int
    content: bytes

    @property
    def text(self) -> str:
        """The content as text; bytes that are not UTF-8 are replaced."""
        return self.content.decode(errors="replace")


class HoleReason(StrEnum):
    """The reason for which lines may be missing."""

    #: The last line that was read did not come again: the file was rotated meanwhile. A pod that is
    #: gone leaves open whether a stream was of the next life instead.
    ROTATED = "the log was rotated while it was not read"
    #: The life had run for a while before its log was first read, and its first lines may be gone.
    START_UNREAD = "the log may have been rotated before it was first read"
    #: The container was restarted several times while its log was not read.
    LIVES_UNREAD = "the container was restarted again before its log was read"
    #: The log of an ended life cannot be read any more, such as after a cleanup by the node.
    LIFE_REMOVED = "the log of an ended container is gone"
    #: The pod was deleted or replaced before its log was read to the end.
    POD_GONE = "the pod was gone before its log was read to the end"
    #: The reader was stopped while the log could not be read, or before it had read all data.
    STOPPED = "the log was not read to the present when its reader stopped"
    #: The reader met an unexpected error, or the receiver of its lines did.
    FAILED = "the reader of the log failed"


@dataclass(frozen=True, slots=True)
class LogHole:
    """A part of a log of which lines may be missing.

    The hole lies between the lines that are delivered before and after this record.

    Attributes:
        place: the container.
        first_life, last_life: numbers of the first and the last life of which lines may be missing.
            After the end of a pod or of the reader, lines of later lives may be missing, too.
        reason: the reason for which they may be missing.
        detail: the error that preceded it; "" for none.
        after: node's time of the last line before the hole; "" if no line was read before.
        before: node's time of the first line after the hole; "" if no such line was read yet.
        t_ns: time at which the hole was noticed, on the monotonic clock of this machine.
    """

    place: LogPlace
    first_life: int
    last_life: int
    reason: HoleReason
    detail: str
    after: str
    before: str
    t_ns: int

    @property
    def lives(self) -> range:
        """The numbers of the lives of which lines may be missing."""
        return range(self.first_life, self.last_life + 1)

    def __str__(self) -> str:
        between = f"after {self.after or 'the start'}"
        if self.before:
            between += f" and before {self.before}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.place.pod}/{self.place.container}: lines may be missing {between}: {self.reason}{detail}"
