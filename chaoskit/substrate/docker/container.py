"""One container, with a supervisor as its first process: everything of a node lives below that."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from chaoskit.errors import HarnessError
from chaoskit.process.linux import await_readable, socket_name
from chaoskit.substrate.docker.image import Recipe
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.undo import ContainerEntry, UndoLog
from chaoskit.substrate.undo.docker_janitor import endpoint, labels, owner, remove_container

_WARM_S = 120.0
_ANSWER_S = 60.0
_LOOK_S = 0.1
#: Root may write into any directory of the run, and raise its priority; nothing else.
_CAPABILITIES = ("DAC_OVERRIDE", "SYS_NICE")
#: What the supervisor last said is shown where it does not start.
_SHOWN_LINES = 20
_FUSE = "/dev/fuse"
_numbers = itertools.count(1)


class Container:
    """Written down in the undo log when it is named; started by :meth:`start`.

    Args:
        sockets: directory in which the supervisor finds the socket that it connects to.
        cold: whether the supervisor is to import nothing beforehand.

    Attributes:
        pid: of the supervisor, in the list of processes that we see, too. handle: the SDK's.
        held: what keeps its processes back now. spent: whether it is not to be used for another run.
    """

    def __init__(
        self, client: Any, recipe: Recipe, station: str, sockets: Path, undo: UndoLog, *, cold: bool
    ) -> None:
        self.station, self.recipe, self.cold = station, recipe, cold
        self.name = f"chaoskit-{owner()}-{next(_numbers)}-{station}"
        self.pid = 0
        self.handle: Any = None
        self.held: set[str] = set()
        self.spent = False
        self._client = client
        self._socket = sockets / f"{station}.sock"
        self._link: SupervisorLink | None = None
        self._undo = undo.plan(ContainerEntry(self.name, owner(), endpoint()))

    def start(self) -> None:
        """Make it, and wait until its supervisor can fork.

        Raises:
            HarnessError: if it ends instead. The SDK's errors, if the daemon refuses it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with socket_name(self._socket) as name:
                listener.bind(name)
            listener.listen(1)
            self.handle = self._create()
            self.handle.start()
            self._link = SupervisorLink(self._accept(listener), f"the supervisor of {self.station}")
        self._socket.unlink()
        if not self._link.await_ready(_WARM_S):
            raise HarnessError(self._complaint())
        self.handle.reload()
        self.pid = int(self.handle.attrs["State"]["Pid"])

    def _create(self) -> Any:
        recipe = self.recipe.with_directories([], [self._socket.parent])
        module = ["-m", "chaoskit.substrate.supervisor", "--connect", str(self._socket)]
        return self._client.containers.create(
            recipe.image,
            [*module, "--cold"] if self.cold else module,
            entrypoint=[recipe.python],
            name=self.name,
            labels=labels(),
            hostname=self.station,
            environment=recipe.environment,
            working_dir=recipe.working_directory,
            mounts=recipe.mounts(),
            network_mode="none",  # it is given its link by us
            pid_mode="host",  # a process has one number, for strikes and for watching
            cap_drop=["ALL"],
            cap_add=list(_CAPABILITIES),
            security_opt=["no-new-privileges"],
            devices=[_FUSE] if Path(_FUSE).exists() else [],  # used by us, from outside
            shm_size=psutil.virtual_memory().total,  # a limit, not a reservation
            log_config={"Type": "json-file", "Config": {"max-size": "1m"}},
        )

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline_s = time.monotonic() + _WARM_S
        while not await_readable([listener.fileno()], _LOOK_S):
            self.handle.reload()
            if self.handle.status != "running" or time.monotonic() > deadline_s:
                raise HarnessError(self._complaint())
        return listener.accept()[0]

    def _complaint(self) -> str:
        self.handle.reload()
        said = self.handle.logs(tail=_SHOWN_LINES).decode(errors="replace").strip()
        return f"the supervisor of {self.station} did not start; container {self.name} is {self.handle.status}: {said}"

    # -- its supervisor -------------------------------------------------------------------------------------------

    @property
    def link(self) -> SupervisorLink:
        """The stream to it. Raises SupervisorGone where the container is gone."""
        if self._link is None:
            raise SupervisorGone(f"the container of {self.station} is gone")
        return self._link

    # -- itself ---------------------------------------------------------------------------------------------------

    def lives(self) -> bool:
        """Whether its supervisor still listens."""
        return self._link is not None and self._link.is_open()

    def state(self) -> dict[str, Any]:
        """What Docker says about it: ``Status``, ``Running``, ``Paused``, ``OOMKilled``, ``ExitCode`` and more."""
        self.handle.reload()
        found: dict[str, Any] = self.handle.attrs["State"]
        return found

    def is_usable(self) -> bool:
        """Whether a run may begin in it."""
        return (
            not self.spent
            and not self.held
            and self.lives()
            and self.state()["Status"] == "running"
        )

    def network_namespace(self) -> int:
        """A descriptor of it, for the caller to close. Raises OSError where the container is gone."""
        return os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def kill(self) -> None:
        """SIGKILL for everything in it. Raises the SDK's errors, if it is gone already."""
        self.spent = True
        self.handle.kill()
        self.handle.wait(timeout=_ANSWER_S)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def remove(self) -> None:
        """End everything in it, and remove it."""
        self.spent = True
        self._disconnect()
        self._socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the entry stays, for the janitor
            remove_container(endpoint(), self.name, owner())
            self._undo.done()
