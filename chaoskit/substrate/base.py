"""What an experiment needs from the place where nodes come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from chaoskit.config import RunConfig
from chaoskit.messages import Message, Trigger


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
