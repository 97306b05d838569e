"""The keeper process of a node, which keeps copies of training states beside the agent.

Copying, digesting, sending and storing take the interpreter's lock now and then, and may wait for a
CPU with it. In the agent's own process that would delay its heartbeat. The agent forks this
process, which ends with the agent, so a node is lost as a whole, whichever of the two ends first.

-> ``daemon/client.py``: the agent's end. ``daemon/keeper_base.py``: the orders.
-> ``daemon/link_probe.py`` and ``daemon/node_check.py``: tests that run in this process, too.
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
from chaoskit.daemon.piece_keeper import PieceKeeper
from chaoskit.daemon.protocol import Adopt, Ended, Finish, Finished, Order, WentOn, decode_order
from chaoskit.daemon.replica_keeper import ReplicaKeeper
from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.process.linux import (
    await_readable,
    die_of,
    die_with_parent,
    more_files,
    raise_priority,
    set_name,
)
from chaoskit.process.progress_board import Board
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
    StoreStep,
)

NAME = "ck-keeper"
_RECEIVE_BYTES = 65536
_DESCRIPTORS_MAX = 253  # the kernel's limit for one message


@dataclass(frozen=True, slots=True)
class KeeperSpec:
    """The node whose copies are to be kept, and its run.

    Attributes:
        token: secret of the run, which authenticates connections.
        run_directory: directory of the run, which gets the journal of the keeper.
        config: settings of the run.
    """

    node: str
    host: str  # address under which other nodes reach this one
    token: str
    run_directory: str
    config: RunConfig
    injection: InjectionDoor | None = None  # None in a run without faults


def start_keeper(
    spec: KeeperSpec, link_test_listener: socket.socket, others: Sequence[socket.socket]
) -> tuple[socket.socket, int]:
    """Fork the keeper process, which serves until the agent ends.

    Call this before this process has any other thread.

    Args:
        spec: the node to serve.
        link_test_listener: socket that listens for link tests of other nodes; closed in this
            process.
        others: sockets of this process that the keeper must not hold open.

    Returns:
        This process's end of the connection to the keeper, and the port at which it accepts copies
        of pieces; 0 in a job of replicas.

    Raises:
        OSError: if a sharded job has no port to listen at, or the process cannot be forked.
    """
    agent_end, keeper_end = socket.socketpair()
    listener = socket.create_server((spec.host, 0)) if spec.config.job.sharded else None
    agent_pid = os.getpid()
    if os.fork() == 0:
        _run(keeper_end, listener, link_test_listener, spec, agent_pid, (agent_end, *others))
    keeper_end.close()
    link_test_listener.close()
    if listener is None:
        return agent_end, 0
    with listener:
        return agent_end, int(listener.getsockname()[1])


def _run(
    agent_connection: socket.socket,
    listener: socket.socket | None,
    link_test_listener: socket.socket,
    spec: KeeperSpec,
    agent_pid: int,
    others: Sequence[socket.socket],
) -> None:
    """Run the keeper in the forked process, and end the process. Does not return."""
    try:
        die_with_parent(agent_pid)
        for agent_socket in others:
            agent_socket.close()
        set_name(NAME)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _Service(agent_connection, listener, link_test_listener, spec).serve()
    except ConnectionError:
        pass  # the agent is gone
    except BaseException as error:  # noqa: BLE001 - a forked child must end here
        die_of(error)
    os._exit(0)


class _Service:
    """Dispatches the agent's orders to the keeper, and sends the keeper's answers back."""

    def __init__(
        self,
        agent_connection: socket.socket,
        listener: socket.socket | None,
        link_test_listener: socket.socket,
        spec: KeeperSpec,
    ) -> None:
        self._agent_connection, self._send_lock = agent_connection, threading.Lock()
        self._splitter = frames.FrameSplitter(decode_order)
        self._received_fds: deque[int] = deque()
        self._spec, node, config = spec, spec.node, spec.config
        # the agent writes to the same file, which is safe because a record is one write
        self._journal = Journal(
            Path(spec.run_directory) / "journal", node, role="keeper", node=node
        )
        callbacks = (self._send, die_of, self._report)
        context = NodeContext(node, spec.host, spec.token, config, self._journal, *callbacks)
        self._injection = dial(spec.injection, node)
        self._keeper: NodeKeeper = (
            ReplicaKeeper(context) if listener is None else PieceKeeper(context, listener)
        )
        answer_tests(spec.token, link_test_listener)
        if config.health != "off":
            # not in the agent, where a delay of the interpreter looks like the loss of the node
            start_checkup(node, disk_directory(spec.run_directory, node), config.device, self._send)

    def serve(self) -> None:
        """Carry out the agent's orders until its end of the connection closes.

        Most orders are only queued for the keeper's thread. The end is recorded in the journal.

        Raises:
            ChaoskitError: if the descriptors of an order were lost.
            ConnectionError: if the connection fails.
        """
        raise_priority()  # not inherited by the other threads; a recovery may wait for an order
        while True:
            if self._injection is not None:
                self._await_orders(self._injection)
            data, descriptors, flags, _ = socket.recv_fds(
                self._agent_connection, _RECEIVE_BYTES, _DESCRIPTORS_MAX
            )
            if flags & socket.MSG_CTRUNC:  # later orders would get the descriptors of this one
                raise ChaoskitError(f"{NAME} has too few file descriptors: {more_files()}")
            if not data:
                self._journal.sign_off("its agent ended")
                return
            self._received_fds.extend(descriptors)
            for order in self._splitter.feed(data):
                self._dispatch(order)

    def _await_orders(self, injection: InjectionLine) -> None:
        """Carry out acts of faults until there is an order of the agent.

        If the harness is gone, close the connection to it and return.
        """
        while self._agent_connection.fileno() not in (
            ready := await_readable([self._agent_connection.fileno(), injection.fileno()])
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
        """Send the report of an act to the harness, if it is connected. Called on any thread."""
        if (injection := self._injection) is not None:
            injection.send(report)

    def _send(self, message: Message) -> None:
        """Send a message to the agent. Called on any thread.

        If the agent is gone, end this process.
        """
        try:
            with self._send_lock:
                frames.send(self._agent_connection, message)
        except ConnectionError:
            os._exit(0)  # the agent is gone

    def _dispatch(self, order: Order) -> None:
        """Call the keeper's method for an order, and send the answer that some orders have."""
        keeper = self._keeper
        match order:
            case Adopt():
                self._adopt(order)
            case Holding():
                fds = self._take_descriptors(len(order.fds))
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
            case StoreStep(step):
                keeper.store(step)
            case MeasureLinks():
                start_tests(self._spec.node, self._spec.token, order, self._send)
            case Finish(timeout_s, last, workers):
                keeper.finish(timeout_s, last=last, workers=workers)
                # before the answer, after which the agent ends this process
                self._journal.sign_off("the job ended")
                self._send(Finished())

    def _adopt(self, order: Adopt) -> None:
        """Have the keeper map the board and the arena whose descriptors came with the order."""
        page, bell = self._take_descriptors(2)
        arena = self._take_descriptors(int(order.endpoint.arena_fd >= 0))
        own_endpoint = msgspec.structs.replace(
            order.endpoint, pid=os.getpid(), arena_fd=arena[0] if arena else -1
        )
        self._keeper.adopt(order.worker, own_endpoint, Board(page, bell))
        _close((page, *arena))  # the mappings stay

    def _take_descriptors(self, count: int) -> tuple[int, ...]:
        """Remove the next ``count`` received descriptors from the queue, and return them."""
        return tuple(self._received_fds.popleft() for _ in range(count))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
