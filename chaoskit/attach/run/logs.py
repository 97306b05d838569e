"""The logs of an attached run: one file for each node, whatever pods have had its place.

The follower of the run gets the lines with the time at which they arrived, however late it asks.

-> attach/logs/follower.py reads them. attach/logs/files.py writes the files and their records.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaoskit.attach.logs.files import LogFiles
from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import ContainerLine, LogHole
from chaoskit.journal import Journal
from chaoskit.rules.log_file import ArrivedPart, ArrivingLog
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

_ANSWER_BYTES = 1 << 20  # to a reader, about


class AttachedLogs:
    """The logs of the containers that train, from the begin of the run; those of later pods whole.

    Args:
        api: client of the namespace of the job.
        run_directory: the directory of the run.
    """

    def __init__(self, api: KubernetesApi, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._nodes: dict[str, str] = {}  # UID of a pod -> its node
        self._arriving: defaultdict[str, UnreadLines] = defaultdict(UnreadLines)
        self._journal: Journal | None = None
        self._files: LogFiles | None = None
        self._follower = LogFollower(api, self._receive, tail_lines=0)

    def open(self, journal: Journal) -> None:
        """Begin to write files, and records to a journal. Nothing may be followed before."""
        self._journal = journal
        self._files = LogFiles(
            self._run_directory, journal, lambda place: self._nodes[place.pod_uid]
        )

    def arriving(self, node: str) -> ArrivingLog:
        """Return the lines in the file of a node, for one reader."""
        return self._arriving[node]

    def follow(self, node: str, pod: Mapping[str, Any], container: str) -> None:
        """Follow a container in the pod that has the place of a node now.

        Args:
            node: the node.
            pod: the object of the pod.
            container: name of the container that trains.
        """
        is_successor = node in self._nodes.values()
        self._nodes[pod["metadata"]["uid"]] = node
        self._follower.follow(pod, [container], from_begin=is_successor)

    def close(self) -> None:
        """End the followers, and close the files and the journal.

        Raises:
            Exception: the first unexpected error of a follower.
        """
        with contextlib.ExitStack() as closed:
            if self._files is not None and self._journal is not None:
                closed.callback(self._journal.close, "the run has ended")
                closed.callback(self._files.close)
            self._follower.close()

    def _receive(self, records: Sequence[ContainerLine | LogHole]) -> None:
        """Write lines and holes."""
        assert self._files is not None, "open() comes before follow()"
        for record in records:  # before the files change, which wakes the reader
            if isinstance(record, ContainerLine):
                self._arriving[self._nodes[record.place.pod_uid]].add(record)
        self._files.receive(records)


class UnreadLines:
    """The lines of a node that its reader has not asked for yet, as an :class:`ArrivingLog`.

    A line that is delivered late, as its life had to be proved, is not older than the one before it:
    the judge finds the lines in their order by their times.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[ArrivedPart] = []
        self._newest_ns = 0

    def add(self, line: ContainerLine) -> None:
        """Add a line."""
        with self._lock:
            self._newest_ns = max(self._newest_ns, line.t_ns)
            self._parts.append(ArrivedPart(line.content + b"\n", self._newest_ns))

    def read(self) -> Sequence[ArrivedPart]:
        with self._lock:
            size_bytes = count = 0
            while count < len(self._parts) and size_bytes < _ANSWER_BYTES:
                size_bytes += len(self._parts[count].data)
                count += 1
            parts, self._parts = self._parts[:count], self._parts[count:]
        return parts

    def close(self) -> None:
        """Do nothing: the follower of the log ends with the run."""
