"""Send copies of a piece from its slots to its partners, the newest snapshot first.

A step is protected once a partner has verified its copy. A transfer is finished even if a newer
snapshot is complete. Cancelled half-way, it would have cost the same bytes and protected nothing.
Over a link that is slower than a step, no copy would ever arrive. After a transfer the newest
snapshot is sent, and those between are skipped. The protected step is thus never older than two
transfers and a step. A slot is locked during its transfer, and the snapshotter drops a snapshot
that finds no other slot.

-> ``peer/copy_placement.py``: which partners. ``peer/server.py``: the partner, which verifies and
keeps.
-> ``runtime/state/peer.py``: a copy is read back after a loss.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Seal, Torn
from chaoskit.checkpoint.memory.stored import StoredCopy, newest
from chaoskit.checkpoint.peer import protocol
from chaoskit.checkpoint.peer.protocol import (
    Ask,
    Declined,
    Go,
    Offer,
    PeerAddress,
    PeerHolding,
    PeerStored,
    SlotPlace,
)
from chaoskit.errors import Refused
from chaoskit.process.linux import await_readable, host_id, lower_priority, set_name
from chaoskit.wire import frames

_NICENESS = 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 5.0
#: A generator of its own: the training's numbers must not depend on copies that fail.
_JITTER = random.Random()

#: Moments at which ``probe`` is called: before an offer, within a transfer, when it is
#: acknowledged.
OFFERING, SENDING, ACKNOWLEDGED = "offering", "sending", "acknowledged"


class CopySender:
    """A sender that keeps the copies of one piece at its partners up to date.

    Each partner has a thread of its own, so a partner that is gone or slow delays no other.

    Args:
        piece: name of the piece.
        paths: the slots of the piece, of this process or of another one on this host.
        partners: copy servers of the partners.
        token: secret that authenticates connections.
        transport: ``auto`` (partners on this host read the slots themselves) or ``tcp``.
        is_current: returns True for a copy of the present course of training. When training goes
            back, call :meth:`notify`: newer copies at a partner count no more, and it gets the
            older one once more.
        on_acknowledged: called with node and seal when a partner has stored and verified a copy, or
            still has it.
        on_lost: called with the node that is out of reach or has dropped an acknowledged copy.
        on_failed: called with node and reason of a failure, once for each reason in a row.
        made: called with the descriptor of each socket, before it is connected.
        unmade: called with the descriptor before the socket is closed.
        niceness: niceness of the threads. Use 0 in a process that trains: there a thread that has
            to wait may hold the interpreter's lock.
        probe: called with :data:`OFFERING`, :data:`SENDING` and :data:`ACKNOWLEDGED` at these
            moments, for tests that end the process there.
    """

    def __init__(
        self,
        piece: str,
        paths: Sequence[str],
        partners: Sequence[PeerAddress],
        token: str,
        *,
        transport: str = "auto",
        is_current: Callable[[Seal], bool] = lambda seal: True,
        on_acknowledged: Callable[[str, Seal], None] = lambda node, seal: None,
        on_lost: Callable[[str], None] = lambda node: None,
        on_failed: Callable[[str, str], None] = lambda node, reason: None,
        made: Callable[[int], None] = lambda fd: None,
        unmade: Callable[[int], None] = lambda fd: None,
        niceness: int = _NICENESS,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self.piece, self.paths = piece, tuple(paths)
        self.token, self.transport, self.niceness = token, transport, niceness
        self.is_current = is_current
        self.report_acknowledged, self.report_lost = on_acknowledged, on_lost
        self.report_failed = on_failed
        self.made, self.unmade, self.probe = made, unmade, probe
        self.restorable_step = -1  # newest step of which every piece has its copies
        self._threads = [_PartnerThread(self, partner) for partner in partners]
        self.notify()

    @property
    def acknowledged(self) -> dict[str, Seal]:
        """The seal of the newest verified copy, by node.

        Nodes that are out of reach, or have no copy yet, are left out.
        """
        return {
            thread.partner.node: thread.seal for thread in self._threads if thread.seal is not None
        }

    @property
    def protected_step(self) -> int:
        """The newest step of which any partner in reach has a verified copy; -1 if none has one."""
        return max((seal.step for seal in self.acknowledged.values()), default=-1)

    def notify(self) -> None:
        """Wake the threads, because a snapshot was sealed or training went back.

        Returns at once.
        """
        for thread in self._threads:
            thread.wake()

    def follow(self, paths: Sequence[str]) -> None:
        """Send from other slots, because the worker of the piece was replaced."""
        self.paths = tuple(paths)
        self.notify()

    def protect(self, step: int) -> None:
        """Note that every piece of ``step`` has its copies.

        Partners learn of it with the next offer. They keep that step until a newer one is
        protected.
        """
        self.restorable_step = step

    def close(self) -> None:
        """Have the threads stop, also in the middle of a copy. Returns at once."""
        for thread in self._threads:
            thread.stop()


class _PartnerThread:
    """The thread that serves one partner."""

    def __init__(self, sender: CopySender, partner: PeerAddress) -> None:
        self._sender, self.partner = sender, partner
        self.seal: Seal | None = None  # seal of the partner's copy, as far as is known
        self._unconfirmed: Seal | None = None  # seal of its copy before the connection was lost
        self._declined: Seal | None = None
        self._connection: socket.socket | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the ends of the event descriptor and the connection
        self._stopped = self._has_ended = False
        self._failures, self._last_reason = 0, ""
        threading.Thread(target=self._run, name=f"copies-to-{partner.node}", daemon=True).start()

    def wake(self) -> None:
        """Make the thread look for a copy to send. Does nothing after its end."""
        with self._lock:
            if not self._has_ended:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Make the thread end, also in the middle of a copy."""
        self._stopped = True
        self.wake()
        with self._lock:
            if self._connection is not None:
                _shut_down(self._connection)

    def _run(self) -> None:
        """Send copies until the end. After an error, connect again with a back-off."""
        set_name("ck-copy-sender")
        lower_priority(self._sender.niceness)
        while self._wait():
            try:
                self._connect()
                while not self._stopped and (path := self._next_path()):
                    self._send(path)
            except Torn:
                continue  # the slot was just overwritten: notify() follows with the new seal
            except (OSError, Refused, Damaged) as error:
                self._disconnect()
                self._count_failure(str(error) or type(error).__name__)
        self._disconnect()
        with self._lock:
            self._has_ended = True
            os.close(self._wake_fd)

    def _wait(self) -> bool:
        """Wait until there may be a copy to send, or the partner has hung up.

        Return False at the end.
        """
        if self._failures and not self._stopped:
            pause_s = min(
                _BACK_OFF_MAX_S, _BACK_OFF_S * 2 ** (self._failures - 1)
            ) * _JITTER.uniform(0.5, 1.0)
            self._pause(pause_s)
        elif not self._stopped:
            connection = self._connection
            partner = connection.fileno() if connection is not None else -1
            readable = await_readable(
                [self._wake_fd, *([partner] if connection is not None else [])]
            )
            # a partner sends only answers: it is gone, or has dropped the copy
            if partner in readable:
                self._disconnect()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return not self._stopped

    def _pause(self, pause_s: float) -> None:
        """Wait for ``pause_s`` or until the end.

        New snapshots change nothing while the partner is unreachable.
        """
        until_s = time.monotonic() + pause_s
        while not self._stopped and (left_s := until_s - time.monotonic()) > 0:
            if await_readable([self._wake_fd], left_s):
                os.eventfd_read(self._wake_fd)

    def _next_path(self) -> str:
        """Return the path of the slot to send; "" for none."""
        return newest(self._sender.paths, self._newest_recency(), self._sender.is_current)

    def _newest_recency(self) -> tuple[int, int]:
        """Return generation and step of the newest copy that the partner has or has declined.

        (-1, -1) if there is none that counts.
        """
        seals = [
            seal
            for seal in (self.seal, self._declined)
            if seal is not None and self._sender.is_current(seal)
        ]
        return max((seal.recency for seal in seals), default=(-1, -1))

    def _send(self, path: str) -> None:
        """Offer the copy in a slot, and send it if the partner asks for it.

        The answer sets :attr:`seal`, or the seal that was declined, and is reported.

        Raises:
            Torn: if the slot was overwritten.
            Damaged: if the seal or the index in the slot was changed.
            OSError, Refused: if the connection fails, or the partner breaks the protocol.
        """
        connection = self._connect()
        with StoredCopy(path) as copy:
            self._sender.probe(OFFERING)
            protocol.send(connection, self._offer(copy))
            answer = protocol.receive(connection)
            if isinstance(answer, Go):
                _send_copy(connection, copy, lambda _: self._sender.probe(SENDING))
                answer = protocol.receive(connection)
        if isinstance(answer, Declined):
            self._declined = copy.seal
            self._report_failure(answer.reason)
        elif answer == PeerStored(copy.seal):
            self.seal = copy.seal
            self._last_reason = ""
            self._sender.probe(ACKNOWLEDGED)
            self._sender.report_acknowledged(self.partner.node, copy.seal)
        else:
            raise Refused(f"a partner answered another offer: {answer}")

    def _offer(self, copy: StoredCopy) -> Offer:
        """Return the offer of a copy, with its slot if the partner can read it."""
        sender, place = self._sender, None
        if sender.transport == "auto" and self.partner.host_id == host_id():
            place = SlotPlace.at(copy.path, self.partner.host_id)
        return Offer(
            sender.piece,
            copy.seal,
            len(copy.index),
            len(copy.scalars),
            sender.restorable_step,
            place,
        )

    def _connect(self) -> socket.socket:
        """Return the connection to the partner, connecting first if need be.

        Raise OSError or Refused if that fails.
        """
        if self._connection is None:
            address = (self.partner.host, self.partner.port)
            connection = frames.connect(address, self._sender.token, made=self._sender.made)
            connection.settimeout(protocol.SILENT_S)
            with self._lock:
                self._connection = connection
                if self._stopped:
                    _shut_down(connection)
            self._confirm(connection)
        return self._connection

    def _confirm(self, connection: socket.socket) -> None:
        """Ask whether the partner, maybe a new process, still has the acknowledged copy.

        If it has, the copy counts again and is reported as acknowledged. Failures are counted anew
        from here. Raise OSError or Refused if the partner gives no valid answer.
        """
        protocol.send(connection, Ask(self._sender.piece))
        answer = protocol.receive(connection)
        if not isinstance(answer, PeerHolding):
            raise Refused(f"a partner answered Ask with {type(answer).__name__}")
        if self._unconfirmed is not None and self._unconfirmed in [
            copy.seal for copy in answer.copies
        ]:
            self.seal = self._unconfirmed
            self._sender.report_acknowledged(self.partner.node, self.seal)
        self._failures = 0

    def _disconnect(self) -> None:
        """Close the connection. The partner's copy counts no more until it is confirmed.

        The partner is reported as lost if it had a copy.
        """
        with self._lock:
            connection, self._connection = self._connection, None
        if self.seal is not None:
            self.seal, self._unconfirmed = None, self.seal
            self._sender.report_lost(self.partner.node)
        self._declined = None
        if connection is not None:
            self._sender.unmade(connection.fileno())
            connection.close()

    def _count_failure(self, reason: str) -> None:
        """Count a failure, which lengthens the next pause, and report it."""
        self._failures += 1
        if not self._stopped:
            self._report_failure(reason)

    def _report_failure(self, reason: str) -> None:
        """Report a failure, unless the last one had the same reason."""
        if reason != self._last_reason:
            self._last_reason = reason
            self._sender.report_failed(self.partner.node, reason)


def _send_copy(connection: socket.socket, copy: StoredCopy, probe: Callable[[int], None]) -> None:
    """Send index, scalars and data straight from the slot, which saves a copy of every byte."""
    connection.sendall(copy.index)
    connection.sendall(copy.scalars)
    with copy.data() as data:
        for start in range(0, len(data), protocol.SEND_BYTES):
            connection.sendall(data[start : start + protocol.SEND_BYTES])
            probe(start)


def _shut_down(connection: socket.socket) -> None:
    """End a connection, which wakes the thread that uses it. The socket stays open."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end has closed it already
