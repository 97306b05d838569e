"""The kernel of a container that chaoskit did not start: its processes, reached by a hand.

-> substrate/core/processes.py: the interface. ``docs/architecture/hand.md``: the operations.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from chaoskit.attach.hands.hand import ACT_S, Hand, HandRefused
from chaoskit.attach.hands.ranks import ListedProcess, is_ending, listed_ranks, listed_tree
from chaoskit.errors import NodeUnreachable
from chaoskit.hand.fields import LASTS_MAX_S
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process, Thread
from chaoskit.substrate.undo import UndoEntry

Answer = TypeVar("Answer")
_INIT = 1  # pid of the first process of a pid namespace
_STOPPED_STATES = {"T", "t"}


class HandStop(NamedTuple):
    """A stop of a process: the hand that has begun it, and the number of the effect."""

    hand: Hand
    effect: int


class HandKernel:
    """The kernel of one life of a container, queried through its hand on processes.

    Any thread may make queries; each is one round trip to the hand. A query raises NodeUnreachable
    if the hand does not answer, as the processes may still run. They count as gone once the API
    server proves that this life of the container is over.

    SIGSTOP is a stop by ptrace, which ends with the hand that has begun it, however the hand ends.
    SIGKILL of pid 1 is by ptrace, too: a signal from inside its pid namespace does not reach it. All
    other processes end with pid 1, so that a later SIGKILL finds them gone.

    Args:
        hand: returns the standing hand of this life, or raises NodeUnreachable.
        is_over: asks the API server whether this life of the container is over. It is called when
            the hand is gone, and not any more after it returned True.
    """

    def __init__(self, hand: Callable[[], Hand], is_over: Callable[[], bool]) -> None:
        self._hand, self._ask_is_over = hand, is_over
        self._is_over = self._is_init_killed = False
        self._stops_lock = threading.Lock()
        self._stops = dict[tuple[int, int], HandStop]()  # by pid and ticks

    def end(self) -> None:
        """Note that the end of this life of the container is proved: none of its processes lives."""
        self._is_over = True

    def find(self, pid: int) -> Process:
        record = self._find(pid)
        return self._process({"pid": pid, "ticks": None, "name": "", **record})

    def tree(self, root: Process) -> list[Process]:
        return [self._process(record) for record in self._tree(root) if not is_ending(record)]

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal, or stop, continue or kill the process in its place.

        Raises:
            ProcessLookupError: if the process is gone.
            HandUnable: if the kernel refuses. That includes another signal to pid 1, unless pid 1
                has a handler for it.
            HandRefused: for SIGTSTP, SIGTTIN and SIGTTOU, as their stops would outlive the hand.
            NodeUnreachable: if the hand does not answer.
        """
        is_sent = False
        if process.ticks is not None and not (self._is_init_killed and signum == signal.SIGKILL):
            is_sent = self._query(lambda hand: self._send(hand, process, signum), if_gone=False)
        if not is_sent:
            raise ProcessLookupError(f"{process.name} (pid {process.pid}) is gone")

    def is_gone(self, process: Process) -> bool:
        record = self._find(process.pid)
        return not record or record["ticks"] != process.ticks or is_ending(record)

    def is_stopped(self, process: Process) -> bool:
        look = self._ask("look", process)
        states = set(look["states"]) if look else set()
        return bool(states) and states <= _STOPPED_STATES

    def threads(self, process: Process) -> dict[int, Thread]:
        return {
            record["tid"]: Thread(
                record["name"], record["state"], record["cpu_ticks"], record["switches"]
            )
            for record in self._ask("threads", process).get("threads", ())
        }

    def launched_ranks(self, root: Process) -> dict[Process, LaunchedRank]:
        """Return the processes that train, and their ranks.

        ``root`` counts, too: the first process of a container may be ``python train.py`` itself.
        Launchers, and processes that inherited the variable of a rank, are left out.
        """
        tree = self._tree(root, with_variables=True)
        ranks = listed_ranks(tree)
        return {
            self._process(record): ranks[record["pid"]]
            for record in tree
            if record["pid"] in ranks and not is_ending(record)
        }

    def exit_status(self, process: Process) -> int | None:
        record = self._find(process.pid)
        is_same = bool(record) and record["ticks"] == process.ticks
        return record.get("status") if is_same else None

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        counters = self._ask("tcp", process)
        return TcpTroubles(counters["losses"], counters["resets"]) if counters else TcpTroubles()

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        # its hand ends with the runner, and the kernel lets go what a dead hand has stopped
        return ()

    # -- questions ---------------------------------------------------------------------------------

    def _query(self, act: Callable[[Hand], Answer], if_gone: Answer) -> Answer:
        """Return the result of an act on the hand, or ``if_gone`` if the container is over.

        Raises NodeUnreachable if the hand does not answer, and its processes may still run.
        """
        if not self._is_over:
            try:
                return act(self._hand())
            except NodeUnreachable:
                if not self._is_proved_over():
                    raise
        return if_gone

    def _is_proved_over(self) -> bool:
        """Return whether this life of the container is over. The proof is remembered."""
        self._is_over = self._is_over or self._ask_is_over()
        return self._is_over

    def _find(self, pid: int) -> dict[str, Any]:
        """Return the fields of the process that has a pid now; empty if there is none."""
        record = self._query(lambda hand: hand.query("find", pid=pid), {"gone": True})
        return {} if record.get("gone") else record

    def _ask(self, operation: str, process: Process) -> dict[str, Any]:
        """Return the hand's answer about a process; empty if the process is gone."""
        if process.ticks is None:
            return {}
        pid, ticks = process.pid, process.ticks
        answer = self._query(
            lambda hand: hand.query(operation, pid=pid, ticks=ticks), {"gone": True}
        )
        return {} if answer.get("gone") else answer

    def _tree(self, root: Process, *, with_variables: bool = False) -> list[ListedProcess]:
        """Return a process and its descendants as the hand lists them, ending ones included.

        The list is empty if the process is gone, or its pid is another one by now.
        """
        nothing: dict[str, Any] = {"processes": []}
        answer = self._query(lambda hand: hand.query("list", variables=with_variables), nothing)
        tree = listed_tree(answer["processes"], root.pid)
        return tree if tree and tree[0]["ticks"] == root.ticks else []

    def _process(self, record: ListedProcess) -> Process:
        return Process(record["pid"], record["ticks"], record["name"], self)

    # -- signals -----------------------------------------------------------------------------------

    def _send(self, hand: Hand, process: Process, signum: int) -> bool:
        """Send a signal to a process, and return whether it still existed."""
        assert process.ticks is not None
        identity = {"pid": process.pid, "ticks": process.ticks}
        try:
            if signum == signal.SIGKILL:
                hand.kill(**identity, limit_s=ACT_S)
                self._is_init_killed = self._is_init_killed or process.pid == _INIT
            elif signum == signal.SIGSTOP:
                self._stop(hand, **identity)
            elif signum == signal.SIGCONT:
                return self._continue(hand, **identity)
            else:
                hand.ask("signal", **identity, signum=signum, limit_s=ACT_S)
        except HandRefused as refused:
            if refused.field != "ticks":
                raise
            return False
        return True

    def _stop(self, hand: Hand, pid: int, ticks: int) -> None:
        """Stop a process, unless this kernel holds it already. The stop then lasts longer."""
        with self._stops_lock:
            stop = self._stops.get((pid, ticks))
            if stop is not None and stop.hand is hand and _extend(stop):
                return
            answer = hand.ask("stop", pid=pid, ticks=ticks, lasts_s=LASTS_MAX_S, limit_s=ACT_S)
            self._stops[pid, ticks] = HandStop(hand, answer["number"])

    def _continue(self, hand: Hand, pid: int, ticks: int) -> bool:
        """Let a process go on that this kernel has stopped, and return whether it still exists.

        A process that is not held goes on anyway: the stop has ended with its hand.
        """
        with self._stops_lock:
            stop = self._stops.get((pid, ticks))
            if stop is not None and stop.hand is hand:
                _lift(stop)
            self._stops.pop((pid, ticks), None)
        record = hand.query("find", pid=pid)
        return record.get("ticks") == ticks and not is_ending(record)


def _extend(stop: HandStop) -> bool:
    """Let a stop last longer, and return whether it still lasted."""
    try:
        stop.hand.ask("extend", effect=stop.effect, lasts_s=LASTS_MAX_S, limit_s=ACT_S)
    except HandRefused:
        return False
    return True


def _lift(stop: HandStop) -> None:
    """End a stop, unless it has ended before, as with its process.

    A silent hand costs one wait, however many stops it must end.
    """
    limit_s = 0.0 if stop.hand.is_silent else ACT_S
    try:
        stop.hand.ask("lift", effect=stop.effect, limit_s=limit_s)
    except HandRefused as refused:
        if refused.field != "effect":
            raise
