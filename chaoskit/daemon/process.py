"""The process that keeps a node's copies, beside its agent.

To copy, digest, send, receive and store takes the interpreter's lock now and then, and may wait for a CPU with it: in
the agent's own process that would hold up its heartbeat. The agent forks this one and ends with it; so a node is lost
as a whole, whichever of the two ends first.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaoskit.config import RunConfig, disk_directory
from chaoskit.daemon.keeper_base import NodeContext, NodeKeeper
from chaoskit.daemon.link_probe import answer_tests, start_tests
from chaoskit.daemon.node_check import start_checkup
from chaoskit.daemon.partition_keeper import PieceKeeper
from chaoskit.daemon.protocol import Adopt, Ended, Finish, Finished, Order, WentOn, decode_order
from chaoskit.daemon.replica_keeper import Keeper
from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import (
    await_readable,
    die_of,
    die_with_parent,
    more_files,
    raise_priority,
    set_name,
)
from chaoskit.wire import frames
from chaoskit.wire.injection_line import InjectionDoor, InjectionLine, dial
from chaoskit.wire.messages import (
    ActReport,
    DaemonAct,
    Holding,
    MeasureLinks,
    Message,
    Plan,
    Recall,
    Store,
)

NAME = "ck-keeper"
_RECEIVE_BYTES = 65536
_DESCRIPTORS_MAX = 253  # the kernel's limit for one message


@dataclass(frozen=True, slots=True)
class Quarters:
    """The node whose copies are to be kept."""

    node: str
    host: str  # address under which other nodes reach this one
    token: str
    run_directory: str
    config: RunConfig
    injection: InjectionDoor | None = None  # of a run with faults


def start_keeper(
    quarters: Quarters, door: socket.socket, others: Sequence[socket.socket]
) -> tuple[socket.socket, int]:
    """Fork the process. To be called before this one has any other thread.

    Args:
        door: listens where other nodes test their links to this one; closed here.
        others: sockets of this process, which the keeper must not hold open.

    Returns:
        Our end of the line to it, and the port where partners bring copies of pieces; 0 in a job of replicas.
    """
    mine, theirs = socket.socketpair()
    listener = socket.create_server((quarters.host, 0)) if quarters.config.job.sharded else None
    me = os.getpid()
    if os.fork() == 0:
        _run(theirs, listener, door, quarters, me, (mine, *others))
    theirs.close()
    door.close()
    if listener is None:
        return mine, 0
    with listener:
        return mine, int(listener.getsockname()[1])


def _run(
    line: socket.socket,
    listener: socket.socket | None,
    door: socket.socket,
    quarters: Quarters,
    agent_pid: int,
    others: Sequence[socket.socket],
) -> None:
    """The life of the process. Does not return."""
    try:
        die_with_parent(agent_pid)
        for one in others:
            one.close()
        set_name(NAME)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _Service(line, listener, door, quarters).serve()
    except ConnectionError:
        pass  # the agent is gone
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        die_of(error)
    os._exit(0)


class _Service:
    """Takes the agent's orders from the line to the keeper, and the keeper's answers back."""

    def __init__(
        self,
        line: socket.socket,
        listener: socket.socket | None,
        door: socket.socket,
        quarters: Quarters,
    ) -> None:
        self._line, self._sending = line, threading.Lock()
        self._splitter = frames.Splitter(decode_order)
        self._descriptors: deque[int] = deque()
        self._quarters, node, config = quarters, quarters.node, quarters.config
        # the agent's file, too: a record is one write
        self._journal = Journal(
            Path(quarters.run_directory) / "journal", node, role="keeper", node=node
        )
        told = (self._tell, die_of, self._report)
        context = NodeContext(node, quarters.host, quarters.token, config, self._journal, *told)
        self._injection = dial(quarters.injection, node)
        self._keeper: NodeKeeper = (
            Keeper(context) if listener is None else PieceKeeper(context, listener)
        )
        answer_tests(quarters.token, door)
        if config.health != "off":
            # not in the agent: what holds up its interpreter looks like the loss of the node
            start_checkup(
                node, disk_directory(quarters.run_directory, node), config.device, self._tell
            )

    def serve(self) -> None:
        """Until the agent goes away."""
        raise_priority()  # after all other threads were started: what is ordered may be on the way of a recovery
        while True:
            if self._injection is not None:
                self._await_orders(self._injection)
            data, descriptors, flags, _ = socket.recv_fds(
                self._line, _RECEIVE_BYTES, _DESCRIPTORS_MAX
            )
            if flags & socket.MSG_CTRUNC:  # later orders would get what belongs to this one
                raise ChaoskitError(f"{NAME} has no room for the files of a worker: {more_files()}")
            if not data:
                self._journal.sign_off("its agent ended")
                return
            self._descriptors.extend(descriptors)
            for order in self._splitter.feed(data):
                self._obey(order)

    def _await_orders(self, injection: InjectionLine) -> None:
        """Until there is one of the agent, do what the harness orders."""
        while self._line.fileno() not in (
            ready := await_readable([self._line.fileno(), injection.fileno()])
        ):
            assert ready
            match injection.receive():
                case DaemonAct(fault, act):
                    self._keeper.carry_out(fault, act)
                case None:
                    injection.close()
                    self._injection = None
                    return

    def _report(self, report: ActReport) -> None:
        """From any thread."""
        if (injection := self._injection) is not None:
            injection.send(report)

    def _tell(self, message: Message) -> None:
        """From any thread."""
        try:
            with self._sending:
                frames.send(self._line, message)
        except ConnectionError:
            os._exit(0)  # the agent is gone

    def _obey(self, order: Order) -> None:
        keeper = self._keeper
        match order:
            case Adopt():
                self._adopt(order)
            case Holding():
                fds = self._take(len(order.fds))
                keeper.hold(msgspec.structs.replace(order, pid=os.getpid(), fds=fds))
                _close(fds)
            case Plan():
                keeper.follow(order)
            case Ended(worker):
                keeper.ended(worker)
            case Recall(number):
                keeper.recall(number)
            case WentOn(step):
                keeper.went_on(step)
            case Store(step):
                keeper.store(step)
            case MeasureLinks():
                start_tests(self._quarters.node, self._quarters.token, order, self._tell)
            case Finish(timeout_s, last, workers):
                keeper.finish(timeout_s, last=last, workers=workers)
                self._journal.sign_off(
                    "the job ended"
                )  # its agent ends as soon as it hears this, and it with that
                self._tell(Finished())

    def _adopt(self, order: Adopt) -> None:
        page, bell = self._take(2)
        arena = self._take(int(order.endpoint.arena_fd >= 0))
        here = msgspec.structs.replace(
            order.endpoint, pid=os.getpid(), arena_fd=arena[0] if arena else -1
        )
        self._keeper.adopt(order.worker, here, Board(page, bell))
        _close((page, *arena))  # the mappings are enough

    def _take(self, count: int) -> tuple[int, ...]:
        """Descriptors that came with the order."""
        return tuple(self._descriptors.popleft() for _ in range(count))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
