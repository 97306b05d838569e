"""From the slots of a piece to its partners, the newest snapshot first; protected once a partner has verified it.

A snapshot that is on its way is finished even when a newer one is complete: given up half-way, it would have cost the
same bytes and protected nothing, and over a link that is slower than a step nothing would ever arrive. Then the newest
goes next, and those between are skipped. So what is protected is never older than two transfers and a step. While a
slot is on its way it is locked, and the snapshotter drops a snapshot that finds no other slot.
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
    Holding,
    Offer,
    PeerAddress,
    SlotPlace,
    Stored,
)
from chaoskit.errors import Refused
from chaoskit.process.linux import await_readable, host_id, lower_priority, set_name
from chaoskit.wire import frames

_NICENESS = 10
_BACK_OFF_S = 0.05
_BACK_OFF_MAX_S = 5.0

#: Moments that ``probe`` is told of: before an offer, within a transfer, when it is acknowledged.
OFFERING, SENDING, ACKNOWLEDGED = "offering", "sending", "acknowledged"


class CopySender:
    """Keeps the copies of one piece at its partners up to date. A partner that is gone or slow holds up nobody.

    Args:
        paths: the slots of the piece, of this process or of another one on this host.
        transport: ``auto`` (partners on this host read the slots themselves) or ``tcp``.
        counts: whether a copy is of what is trained now. When training goes back a partner gets what it goes back to
            once more, and :meth:`notify` must be called: the newest copy that it is known to have counts no more.
        acknowledged: told node and seal when a partner has stored and verified a copy, or still has it.
        lost: told the node that has dropped what it had acknowledged, or is out of reach: it counts no more.
        failed: told node and reason when one did not, once for each reason in a row.
        made: told the descriptor of each socket, before it is connected; ``unmade`` before it is closed.
        niceness: of the threads. In a process that trains use 0: there a thread that has to wait may hold the lock of
            the interpreter.
        probe: told the moments named above, for tests that end the process there.
    """

    def __init__(
        self,
        piece: str,
        paths: Sequence[str],
        partners: Sequence[PeerAddress],
        token: str,
        *,
        transport: str = "auto",
        counts: Callable[[Seal], bool] = lambda seal: True,
        acknowledged: Callable[[str, Seal], None] = lambda node, seal: None,
        lost: Callable[[str], None] = lambda node: None,
        failed: Callable[[str, str], None] = lambda node, reason: None,
        made: Callable[[int], None] = lambda fd: None,
        unmade: Callable[[int], None] = lambda fd: None,
        niceness: int = _NICENESS,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self.piece, self.paths = piece, tuple(paths)
        self.token, self.transport, self.niceness = token, transport, niceness
        self.counts = counts
        self.tell_acknowledged, self.tell_lost, self.tell_failed = acknowledged, lost, failed
        self.made, self.unmade, self.probe = made, unmade, probe
        self.protected = -1
        self._lines = [_Line(self, partner) for partner in partners]
        self.notify()

    @property
    def acknowledged(self) -> dict[str, Seal]:
        """By node: the newest copy that it has verified, and keeps. Without those that are out of reach."""
        return {line.partner.node: line.seal for line in self._lines if line.seal is not None}

    @property
    def protected_step(self) -> int:
        """The newest step of which a partner has a verified copy; -1 before the first."""
        return max((seal.step for seal in self.acknowledged.values()), default=-1)

    def notify(self) -> None:
        """A snapshot was sealed. Returns at once."""
        for line in self._lines:
            line.wake()

    def follow(self, paths: Sequence[str]) -> None:
        """The piece lies in other slots now: its worker was replaced."""
        self.paths = tuple(paths)
        self.notify()

    def protect(self, step: int) -> None:
        """Every piece of ``step`` has its copies: partners keep it until a newer one is protected."""
        self.protected = step

    def close(self) -> None:
        """Stop, also in the middle of a copy."""
        for line in self._lines:
            line.stop()


class _Line:
    """The thread that serves one partner."""

    def __init__(self, sender: CopySender, partner: PeerAddress) -> None:
        self._sender, self.partner = sender, partner
        self.seal: Seal | None = None  # of what the partner has, as far as is known
        self._unconfirmed: Seal | None = None  # of what it had before the connection was lost
        self._declined: Seal | None = None
        self._connection: socket.socket | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of the bell's end, and the connection's
        self._stopped = self._over = False
        self._failures, self._last_reason = 0, ""
        threading.Thread(target=self._run, name=f"copies-to-{partner.node}", daemon=True).start()

    def wake(self) -> None:
        with self._lock:
            if not self._over:
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        self._stopped = True
        self.wake()
        with self._lock:
            if self._connection is not None:
                _shut(self._connection)

    def _run(self) -> None:
        set_name("ck-copy-sender")
        lower_priority(self._sender.niceness)
        while self._wait():
            try:
                self._connect()
                while not self._stopped and (path := self._next()):
                    self._send(path)
            except Torn:
                continue  # overwritten at this moment: its seal will be told
            except (OSError, Refused, Damaged) as error:
                self._disconnect()
                self._fail(str(error) or type(error).__name__)
        self._disconnect()
        with self._lock:
            self._over = True
            os.close(self._bell)

    def _wait(self) -> bool:
        """Until there may be something to send, or the partner has hung up; False at the end."""
        if self._failures and not self._stopped:
            pause_s = min(
                _BACK_OFF_MAX_S, _BACK_OFF_S * 2 ** (self._failures - 1)
            ) * random.uniform(0.5, 1.0)
            self._pause(pause_s)
        elif not self._stopped:
            connection = self._connection
            partner = connection.fileno() if connection is not None else -1
            readable = await_readable([self._bell, *([partner] if connection is not None else [])])
            if partner in readable:  # it says nothing unasked: it is gone, or has dropped the copy
                self._disconnect()
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return not self._stopped

    def _pause(self, pause_s: float) -> None:
        """News change nothing while the partner is out of reach; the end does."""
        until_s = time.monotonic() + pause_s
        while not self._stopped and (left_s := until_s - time.monotonic()) > 0:
            if await_readable([self._bell], left_s):
                os.eventfd_read(self._bell)

    def _next(self) -> str:
        """The slot to be sent; "" for none."""
        return newest(self._sender.paths, self._after(), self._sender.counts)

    def _after(self) -> tuple[int, int]:
        known = [
            seal
            for seal in (self.seal, self._declined)
            if seal is not None and self._sender.counts(seal)
        ]
        return max((seal.recency for seal in known), default=(-1, -1))

    def _send(self, path: str) -> None:
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
            self._tell(answer.reason)
        elif answer == Stored(copy.seal):
            self.seal = copy.seal
            self._last_reason = ""
            self._sender.probe(ACKNOWLEDGED)
            self._sender.tell_acknowledged(self.partner.node, copy.seal)
        else:
            raise Refused(f"an answer to another offer: {answer}")

    def _offer(self, copy: StoredCopy) -> Offer:
        sender, place = self._sender, None
        if sender.transport == "auto" and self.partner.host_id == host_id():
            place = SlotPlace.at(copy.path, self.partner.host_id)
        return Offer(
            sender.piece, copy.seal, len(copy.index), len(copy.scalars), sender.protected, place
        )

    def _connect(self) -> socket.socket:
        if self._connection is None:
            address = (self.partner.host, self.partner.port)
            connection = frames.connect(address, self._sender.token, made=self._sender.made)
            connection.settimeout(protocol.SILENT_S)
            with self._lock:
                self._connection = connection
                if self._stopped:
                    _shut(connection)
            self._confirm(connection)
        return self._connection

    def _confirm(self, connection: socket.socket) -> None:
        """What the partner acknowledged counts only if it still has it: it may be another process."""
        protocol.send(connection, Ask(self._sender.piece))
        answer = protocol.receive(connection)
        if not isinstance(answer, Holding):
            raise Refused(f"{type(answer).__name__} is no answer to that question")
        if self._unconfirmed is not None and self._unconfirmed in [
            copy.seal for copy in answer.copies
        ]:
            self.seal = self._unconfirmed
            self._sender.tell_acknowledged(self.partner.node, self.seal)
        self._failures = 0

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if self.seal is not None:
            self.seal, self._unconfirmed = None, self.seal
            self._sender.tell_lost(self.partner.node)
        self._declined = None
        if connection is not None:
            self._sender.unmade(connection.fileno())
            connection.close()

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if not self._stopped:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._sender.tell_failed(self.partner.node, reason)


def _send_copy(connection: socket.socket, copy: StoredCopy, probe: Callable[[int], None]) -> None:
    """Index, scalars and data, straight from the slot: to read it first would copy every byte once more."""
    connection.sendall(copy.index)
    connection.sendall(copy.scalars)
    with copy.data() as data:
        for start in range(0, len(data), protocol.SEND_BYTES):
            connection.sendall(data[start : start + protocol.SEND_BYTES])
            probe(start)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was faster
