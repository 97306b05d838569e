"""The logs of an attached run: one file for each node, whatever pods have had its place.

-> attach/logs/follower.py reads them. attach/logs/files.py writes the files and their records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaoskit.attach.logs.files import LogFiles
from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import ContainerLine, LogHole
from chaoskit.journal import Journal
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi


class AttachedLogs:
    """The logs of the containers that train, from the begin of the run; those of later pods whole.

    Args:
        api: client of the namespace of the job.
        run_directory: the directory of the run.
    """

    def __init__(self, api: KubernetesApi, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._nodes: dict[str, str] = {}  # UID of a pod -> its node
        self._journal: Journal | None = None
        self._files: LogFiles | None = None
        self._follower = LogFollower(api, self._receive, tail_lines=0)

    def open(self, journal: Journal) -> None:
        """Begin to write files, and records to a journal. Nothing may be followed before."""
        self._journal = journal
        self._files = LogFiles(
            self._run_directory, journal, lambda place: self._nodes[place.pod_uid]
        )

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
        self._files.receive(records)
