"""One container, with a nursery in it: everything of a node lives below that."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from chaoskit.errors import HarnessError
from chaoskit.osprocess import await_readable, socket_name
from chaoskit.substrate.docker_image import Recipe
from chaoskit.substrate.docker_janitor import endpoint, labels, owner, remove_container
from chaoskit.substrate.undo import ContainerEntry, UndoLog

_WARM_S = 120.0
_ANSWER_S = 60.0
_LOOK_S = 0.1
_BYTES_MAX = 4096
#: Root may write into any directory of the run, and raise its priority; nothing else.
_CAPABILITIES = ("DAC_OVERRIDE", "SYS_NICE")
#: What the nursery last said is shown where it does not start.
_SHOWN_LINES = 20
_FUSE = "/dev/fuse"
_numbers = itertools.count(1)


class Container:
    """Written down in the undo log when it is named; started by :meth:`start`.

    Args:
        sockets: directory in which the nursery finds the socket that it connects to.
        cold: whether the nursery is to import nothing beforehand.

    Attributes:
        pid: of the nursery, in the list of processes that we see, too. handle: the SDK's.
        held: what keeps its processes back now. spent: whether it is not to be used for another run.
    """

    def __init__(self, client: Any, recipe: Recipe, station: str, sockets: Path, undo: UndoLog, *, cold: bool) -> None:
        self.station, self.recipe, self.cold = station, recipe, cold
        self.name = f"chaoskit-{owner()}-{next(_numbers)}-{station}"
        self.pid = 0
        self.handle: Any = None
        self.held: set[str] = set()
        self.spent = False
        self._client = client
        self._socket = sockets / f"{station}.sock"
        self._connection: socket.socket | None = None
        self._undo = undo.plan(ContainerEntry(self.name, owner(), endpoint()))

    def start(self) -> None:
        """Make it, and wait until its nursery can fork.

        Raises:
            HarnessError: if it ends instead. The SDK's errors, if the daemon refuses it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with socket_name(self._socket) as name:
                listener.bind(name)
            listener.listen(1)
            self.handle = self._create()
            self.handle.start()
            self._connection = self._accept(listener)
        self._socket.unlink()
        if self._receive(_WARM_S) != b"ready":
            raise HarnessError(self._complaint())
        self.handle.reload()
        self.pid = int(self.handle.attrs["State"]["Pid"])

    def _create(self) -> Any:
        recipe = self.recipe.with_directories([], [self._socket.parent])
        module = ["-m", "chaoskit.substrate.nursery", "--connect", str(self._socket)]
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
        return f"the nursery of {self.station} did not start; container {self.name} is {self.handle.status}: {said}"

    # -- its nursery ----------------------------------------------------------------------------------------------

    def ask(self, request: msgspec.Struct, *descriptors: int) -> int:
        """What the nursery answers. Raises HarnessError if it is gone."""
        self.tell(request, *descriptors)
        return self.hear()

    def tell(self, request: msgspec.Struct, *descriptors: int) -> None:
        """Send a request, whose answer must then be heard."""
        try:
            socket.send_fds(self._open(), [msgspec.json.encode(request)], list(descriptors))
        except OSError as error:
            raise HarnessError(f"the nursery of {self.station} is gone: {error}") from error

    def hear(self) -> int:
        """The answer to a request."""
        reply = self._receive(_ANSWER_S)
        if not reply:
            raise HarnessError(f"the nursery of {self.station} is gone")
        return int(reply)

    def _open(self) -> socket.socket:
        if self._connection is None:
            raise HarnessError(f"the container of {self.station} is gone")
        return self._connection

    def _receive(self, limit_s: float) -> bytes:
        try:
            readable = await_readable([self._open().fileno()], limit_s)
            return self._open().recv(_BYTES_MAX) if readable else b""
        except ConnectionError:
            return b""

    # -- itself ---------------------------------------------------------------------------------------------------

    def lives(self) -> bool:
        """Whether its nursery still listens: nothing is to be heard of it that nobody has asked."""
        return self._connection is not None and not await_readable([self._connection.fileno()], 0)

    def state(self) -> dict[str, Any]:
        """What Docker says about it: ``Status``, ``Running``, ``Paused``, ``OOMKilled``, ``ExitCode`` and more."""
        self.handle.reload()
        found: dict[str, Any] = self.handle.attrs["State"]
        return found

    def is_usable(self) -> bool:
        """Whether a run may begin in it."""
        return not self.spent and not self.held and self.lives() and self.state()["Status"] == "running"

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
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def remove(self) -> None:
        """End everything in it, and remove it."""
        self.spent = True
        self._disconnect()
        self._socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the entry stays, for the janitor
            remove_container(endpoint(), self.name, owner())
            self._undo.done()
