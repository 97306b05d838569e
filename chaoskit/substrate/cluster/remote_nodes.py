"""The base of substrates whose nodes share no files with the runner, such as pods: each is reached by one stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
from chaoskit.journal import Journal
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.substrate.core.actions import CONTROLLERS, Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.remote_node import BackendAway, why_not
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.vocabulary import Event
from chaoskit.wire.injection_line import InjectionDoor


class AwaySubstrate(SupervisedSubstrate):
    """Base of such substrates. Each says where its supervisors are, and how nodes reach each other.

    The directory of the job goes to each node before its agent starts. Journals and logs come from there as they are
    written, into the run's directory.
    """

    #: Numbers of runs are not those of this machine's processor.
    is_elsewhere = True
    #: Where the files of runs lie on every node; a path that nodes have and the runner need not.
    files = Path("/var/lib/chaoskit")

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._homes: dict[Path, Path] = {}  # of runs: directory here -> there
        self._source: Source | None = None

    def seen_there(self, config: RunConfig) -> RunConfig:
        """With the job's file where :meth:`prepare` has it put."""
        job = config.job
        self._source = Source(job.folder)
        return msgspec.structs.replace(
            config, job=job.moved_to(self.files / "source" / self._source.digest)
        )

    def home(self, run_directory: Path) -> Path:
        if run_directory not in self._homes:
            self._homes[run_directory] = (
                self.files / "runs" / f"{next(self._numbers):03d}-{run_directory.name}"
            )
        return self._homes[run_directory]

    def prepare(self, station: str, run_directory: Path) -> None:
        link = self.link(station)
        self._store_source(link)
        link.ship(
            self.home(run_directory), run_directory, station, with_record=station == COORDINATOR
        )

    def _store_source(self, link: SupervisorLink) -> None:
        """Have the job's directory there, unless it is."""
        if self._source is not None:
            link.store(self._source, self.files / "source")

    def collect(self, run_directory: Path) -> None:
        failures = list[HarnessError]()
        for station in self.links():
            try:
                self.settle(station, run_directory)
            except HarnessError as error:
                failures.append(error)
        self._homes.pop(run_directory, None)
        if failures:
            raise failures[0]

    def settle(self, station: str, run_directory: Path) -> None:
        """Have what a node has written here; what went with it is told in a journal of our own.

        Raises:
            HarnessError: if something came, and could not be written here.
        """
        try:
            self.link(station).settle(self.home(run_directory))
        except SupervisorGone:
            journal = Journal(run_directory / "journal", "substrate", role="substrate")
            journal.write(Event.RECORDS_CUT, node=station)
            journal.close("told")

    def links(self) -> Mapping[str, SupervisorLink]:
        """The supervisors that there are, by the station of each."""
        raise NotImplementedError

    def door(self, station: str, injection: InjectionDoor | None) -> InjectionDoor | None:
        if injection is None:
            return None
        here = Path(injection.path)
        there = self.home(here.parent) / here.name
        self.link(station).open_door(here, there)
        return InjectionDoor(str(there), injection.token)

    def why_not(self, action: type[Action]) -> str:
        self.warm_up()
        return why_not(self.link(COORDINATOR), action)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        coordinator = self.link(COORDINATOR)
        able = frozenset(action for action in CONTROLLERS if not why_not(coordinator, action))
        yield BackendAway(able, self.link, cluster.root, self.home(cluster.run_directory))

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        raise HarnessError(f"the substrate {self.name} runs no commands")
