"""What an experiment needs from the place where nodes come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chaoskit.config import RunConfig
from chaoskit.messages import Message, Trigger


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when it was looked up: ``ticks`` is its start time, which tells it from a later namesake."""

    pid: int
    ticks: int | None
    name: str


class Cluster(Protocol):
    """The nodes of one running job, seen by an observer of its coordinator."""

    address: tuple[str, int]
    token: str

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""

    def send(self, message: Message) -> None:
        """Speak to the coordinator."""

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a worker of this cluster. Raises ProcessLookupError where it is gone."""

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then its zygote, then workers and whatever they started."""

    def coordinator(self) -> Process:
        """The process that decides membership now."""

    def signal_process(self, process: Process, signum: int) -> None:
        """Send a signal to a process that was looked up before. Raises ProcessLookupError where it is gone."""

    def end(self) -> None:
        """End every process of the cluster, and wait until they are gone."""


class Substrate(Protocol):
    """Makes clusters. Kept over many experiments."""

    name: str

    def launch(
        self, config: RunConfig, triggers: tuple[Trigger, ...], run_directory: Path, *, port: int = 0
    ) -> Cluster:
        """Start coordinator and agents of a run. Journals and logs go below ``run_directory``."""

    def close(self) -> None:
        """End everything that this substrate started."""
