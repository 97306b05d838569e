"""The files of a run on its nodes: those of this host, or copies on remote nodes."""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, HarnessError, NodeUnreachable
from chaoskit.journal import Journal
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.base import Needs
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.vocabulary import Event
from chaoskit.wire.injection_line import InjectionDoor


def copied_directories(needs: Needs) -> list[Path]:
    """Return the directories of a command that nodes without this host's files get a copy of.

    These are its working directory and the folders of the files that it names, without those below
    another one, and without folders of installed programs, which the nodes must have themselves.

    Raises:
        BadInput: if one of them is the root directory.
    """
    if Path("/") in (*needs.read, *needs.written):
        raise BadInput(
            "working_directory",
            "/",
            "use another one, and no files of the root directory: nodes have one of their own",
        )
    installed = [
        *map(Path, os.get_exec_path()),
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    ]
    named = [
        directory
        for directory in (Path(os.path.normpath(path)) for path in needs.read)
        if not any(directory.is_relative_to(root) for root in (*installed, *needs.written))
    ]
    return [
        *needs.written,
        *(
            directory
            for directory in dict.fromkeys(named)
            if not any(directory != other and directory.is_relative_to(other) for other in named)
        ),
    ]


class NodeFiles(Protocol):
    """The files that programs of a run need and write on the machines of its nodes."""

    def localize_config(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with the paths of its files as the processes of a run see them.

        Raises BadInput if the job's directory cannot be used.
        """

    def home(self, run_directory: Path) -> Path:
        """Return the path of a run's directory as the processes on its nodes see it."""

    def prepare(self, station: str, run_directory: Path) -> None:
        """Provide the files that programs of a run need on the machine of a node or coordinator.

        It is called before each start of a program. Raises HarnessError if the machine does not
        answer or cannot store them.
        """

    def collect(self, run_directory: Path) -> None:
        """Copy all journals and logs of a run to this machine. The run has ended.

        Raises HarnessError if some could not be copied, once all others are.
        """

    def door(self, station: str, injection: InjectionDoor | None) -> InjectionDoor | None:
        """Return the endpoint at which processes of a node reach the harness.

        Return None if ``injection``, the endpoint on this machine, is None. Raises HarnessError if
        the node cannot provide its own.
        """


class HostFiles:
    """Files of nodes that see the directories of this host: nothing is copied."""

    def localize_config(self, config: RunConfig) -> RunConfig:
        return config

    def home(self, run_directory: Path) -> Path:
        return run_directory

    def prepare(self, station: str, run_directory: Path) -> None:
        """Do nothing: the files are there."""

    def collect(self, run_directory: Path) -> None:
        """Do nothing: the journals and logs were written here."""

    def door(self, station: str, injection: InjectionDoor | None) -> InjectionDoor | None:
        return injection


class RemoteFiles:
    """Files of nodes that share none with the runner, such as pods.

    The directory of the job is sent to each node before its agent starts. Journals and logs are
    received while they are written, and stored in the run's directory.

    Args:
        directory: directory of the files of runs on every node. The runner need not have this path.
        link: returns the link to the supervisor of a node or the coordinator.
        links: returns the links to the existing supervisors, by node name or ``COORDINATOR``.
    """

    def __init__(
        self,
        directory: Path,
        link: Callable[[str], SupervisorLink],
        links: Callable[[], Mapping[str, SupervisorLink]],
    ) -> None:
        self._directory, self._link, self._links = directory, link, links
        self._numbers = itertools.count(1)
        self._homes: dict[Path, Path] = {}  # directory of a run here -> on its nodes
        self._source: Source | None = None

    def localize_config(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with the path to which :meth:`prepare` copies the job's file.

        The job's directory is packed now. Raises BadInput if it is too large or cannot be read.
        """
        job = config.job
        self._source = Source(job.folder)
        return msgspec.structs.replace(
            config, job=job.moved_to(self.source_folder / self._source.digest)
        )

    def home(self, run_directory: Path) -> Path:
        if run_directory not in self._homes:
            self._homes[run_directory] = (
                self._directory / "runs" / f"{next(self._numbers):03d}-{run_directory.name}"
            )
        return self._homes[run_directory]

    def prepare(self, station: str, run_directory: Path) -> None:
        link = self._link(station)
        self.store_source(link)
        link.ship(self.home(run_directory), run_directory, station, with_log=station == COORDINATOR)

    def store_source(self, link: SupervisorLink) -> None:
        """Copy the job's directory to a node, unless it is there.

        Nothing is copied before :meth:`localize_config` has packed it.
        """
        if self._source is not None:
            link.store(self._source, self.source_folder)

    @property
    def source_folder(self) -> Path:
        """The directory on nodes of the copies of directories of this host, by their digests."""
        return self._directory / "source"

    def prepare_command(self, node: str, run_directory: Path, sources: Iterable[Source]) -> None:
        """Copy directories to a node, unless they are there, and receive the files of a run.

        Journals and logs are received while the node writes them. Raises HarnessError if the node
        does not answer or cannot store the copies.
        """
        link = self._link(node)
        for source in sources:
            link.store(source, self.source_folder)
        link.ship(self.home(run_directory), run_directory, node)

    def collect(self, run_directory: Path, log_bytes: int | None = None) -> None:
        """Copy all journals and logs of a run to this machine. The run has ended.

        Raises HarnessError if some could not be copied, once all others are.

        Args:
            log_bytes: most bytes of logs that each node still sends; None for all.
        """
        failures = list[HarnessError]()
        for station in self._links():
            try:
                self.settle(station, run_directory, log_bytes)
            except HarnessError as error:
                failures.append(error)
        self._homes.pop(run_directory, None)
        if failures:
            raise failures[0]

    def settle(self, station: str, run_directory: Path, log_bytes: int | None = None) -> None:
        """Receive the rest of the journals and logs of a node, and store them here.

        If the node is gone, the journal of the substrate notes that its files are incomplete.

        Args:
            log_bytes: most bytes of logs that the node still sends; None for all.

        Raises:
            HarnessError: if received data could not be stored here, or not all has arrived.
        """
        try:
            self._link(station).settle(self.home(run_directory), log_bytes)
        except NodeUnreachable:
            journal = Journal(run_directory / "journal", "substrate", role="substrate")
            journal.write(Event.RECORDS_CUT, node=station)
            journal.close("the record is written")

    def door(self, station: str, injection: InjectionDoor | None) -> InjectionDoor | None:
        if injection is None:
            return None
        local_path = Path(injection.path)
        remote_path = self.home(local_path.parent) / local_path.name
        self._link(station).open_door(local_path, remote_path)
        return InjectionDoor(str(remote_path), injection.token)
