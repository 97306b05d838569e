"""A container whose first process is a supervisor; all processes of a node are below that.

-> docker/substrate.py: when a container is used again, and when it is replaced.
-> substrate/supervisor/server.py is the first process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.process.linux import await_readable, socket_name
from chaoskit.substrate.docker.image import Recipe
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import ContainerEntry, UndoLog
from chaoskit.substrate.undo.docker_janitor import endpoint, labels, owner, remove_container

_WARM_S = 120.0
_ANSWER_S = 60.0
_LOOK_S = 0.1
#: Root may write to any directory of the run and raise its priority; it has no other rights.
_CAPABILITIES = ("DAC_OVERRIDE", "SYS_NICE")
#: Number of last lines of output that are shown if the supervisor does not start.
_SHOWN_LINES = 20
_FUSE = "/dev/fuse"
_numbers = itertools.count(1)


class Container:
    """A container of a station.

    Its name is recorded in the undo log at once; :meth:`start` starts it.

    Args:
        client: client of the Docker SDK.
        recipe: image, interpreter, environment and mounts.
        station: a node, the coordinator, or a container that stands by.
        sockets: directory of the socket that the supervisor connects to.
        cold: True if the supervisor imports nothing beforehand.

    Attributes:
        name: name of the container, which no other one has.
        pid: pid of the supervisor in this process's pid namespace; 0 before the start.
        handle: the SDK's container; None before the start.
        limits_in_force: names of the limits that hold its processes back now.
        is_spent: True if the container must not serve another run.
    """

    def __init__(
        self, client: Any, recipe: Recipe, station: str, sockets: Path, undo: UndoLog, *, cold: bool
    ) -> None:
        self.station, self.recipe, self.cold = station, recipe, cold
        self.name = f"chaoskit-{owner()}-{next(_numbers)}-{station}"
        self.pid = 0
        self.handle: Any = None
        self.limits_in_force: set[str] = set()
        self.is_spent = False
        self._client = client
        self._socket = sockets / f"{station}.sock"
        self._link: SupervisorLink | None = None
        self._undo = undo.plan(ContainerEntry(self.name, owner(), endpoint()))

    def start(self) -> None:
        """Create and start the container, and wait until its supervisor can fork.

        Raises:
            HarnessError: if it ends instead, or does not connect in 120 s, with its last output.
                Also if its version of chaoskit differs. If the daemon refuses it, the SDK's errors
                are raised.
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
            raise HarnessError(self._start_failure())
        self.handle.reload()
        self.pid = int(self.handle.attrs["State"]["Pid"])

    def _create(self) -> Any:
        """Create the container, without starting it, and return the SDK's object."""
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
            network_mode="none",  # the switch gives it its link
            pid_mode="host",  # a process has the same pid here and in the container
            cap_drop=["ALL"],
            cap_add=list(_CAPABILITIES),
            security_opt=["no-new-privileges"],
            devices=[_FUSE] if Path(_FUSE).exists() else [],  # for slow disks, served from outside
            shm_size=psutil.virtual_memory().total,  # a limit, not a reservation
            log_config={"Type": "json-file", "Config": {"max-size": "1m"}},
        )

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Return the connection of the supervisor. Raises HarnessError if it does not connect."""
        deadline_s = time.monotonic() + _WARM_S
        while not await_readable([listener.fileno()], _LOOK_S):
            self.handle.reload()
            if self.handle.status != "running" or time.monotonic() > deadline_s:
                raise HarnessError(self._start_failure())
        return listener.accept()[0]

    def _start_failure(self) -> str:
        """Return the message of a failed start, with the last output of the container."""
        self.handle.reload()
        output = self.handle.logs(tail=_SHOWN_LINES).decode(errors="replace").strip()
        return (
            f"the supervisor of {self.station} did not start; "
            f"container {self.name} is {self.handle.status}: {output}"
        )

    @property
    def link(self) -> SupervisorLink:
        """The link to the supervisor. Raises NodeUnreachable if the container is gone."""
        if self._link is None:
            raise NodeUnreachable(f"the container of {self.station} is gone")
        return self._link

    def lives(self) -> bool:
        """Return whether the stream to the supervisor is open."""
        return self._link is not None and self._link.is_open()

    def state(self) -> dict[str, Any]:
        """Return the state of the container as Docker reports it now.

        Its keys are Docker's: ``Status``, ``Running``, ``OOMKilled``, ``ExitCode`` and others.
        Raises the SDK's errors.
        """
        self.handle.reload()
        state: dict[str, Any] = self.handle.attrs["State"]
        return state

    def is_usable(self) -> bool:
        """Return whether another run may use this container: it runs, and nothing limits it.

        Raises the SDK's errors.
        """
        return (
            not self.is_spent
            and not self.limits_in_force
            and self.lives()
            and self.state()["Status"] == "running"
        )

    def network_namespace(self) -> int:
        """Return a descriptor of its network namespace, which the caller must close.

        Raises OSError if the container is gone.
        """
        return os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def kill(self) -> None:
        """SIGKILL all processes in the container, and wait until it has stopped.

        No run may use it afterwards. Raises the SDK's errors if it is gone already.
        """
        self.is_spent = True
        self.handle.kill()
        self.handle.wait(timeout=_ANSWER_S)
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the stream to the supervisor, which ends with all processes below it."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def remove(self) -> None:
        """End all processes in the container, and remove it.

        If that fails, nothing is raised, and the undo entry stays.
        """
        self.is_spent = True
        self._disconnect()
        self._socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the undo entry stays, and the janitor removes it later
            remove_container(endpoint(), self.name, owner())
            self._undo.done()
