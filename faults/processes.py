"""What faults do to processes, and what they see of them: signals, processes that are gone or stand still."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence

from chaoskit import osprocess
from chaoskit.substrate.base import Process
from chaoskit.substrate.undo import ContinueEntry
from faults.evidence import NodeGone, ProcessEnded, WholeNode
from faults.target import Target


def look_up(target: Target, node: str = "") -> list[Process]:
    """The processes of the target's node, or of another one, now: the agent first. Raises ProcessLookupError."""
    node = node or target.node
    processes = target.cluster.node(node)
    if not processes:
        raise ProcessLookupError(f"{node} has no process any more")
    return processes


def signal_all(target: Target, processes: Iterable[Process], signum: int) -> None:
    """Send a signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # ended with its parent meanwhile
            target.cluster.signal_process(process, signum)


@contextlib.contextmanager
def continued_afterwards(target: Target, processes: Sequence[Process]) -> Iterator[None]:
    """Continue processes that are stopped in a ``with`` when it is left. If the run is killed, its guard does."""
    undo = target.undo.plan(*(ContinueEntry(one.pid, one.ticks) for one in processes))
    try:
        yield
    finally:
        for process in reversed(processes):  # workers first: the agent finds them moving
            osprocess.kill_if_same(process.pid, process.ticks, signal.SIGCONT)
        if left := [one for one in processes if osprocess.is_stopped(one.pid, one.ticks)]:
            target.left_behind.append(f"processes {[one.pid for one in left]} are stopped")
        else:
            undo.done()


def is_gone(process: Process) -> bool:
    """Whether a process has ended, or is about to."""
    return osprocess.start_ticks(process.pid) != process.ticks or osprocess.is_ending(process.pid)


def gone(processes: Sequence[Process], node: str) -> NodeGone | None:
    """Evidence that none of these processes of a node is left; None if some are."""
    if not all(map(is_gone, processes)):
        return None
    first = "the agent" if processes[0].name.startswith("ck-") else processes[0].name
    pids = tuple(process.pid for process in processes)
    return NodeGone(subject=WholeNode(node), source="the kernel's list of processes", first=first, pids=pids)


async def all_gone(target: Target, processes: Sequence[Process]) -> NodeGone:
    """Wait until none of these processes of the target's node is left, and the job did not end by itself before."""
    evidence = await target.seen(lambda: None if target.ended_well else gone(processes, target.node))
    assert evidence is not None
    return evidence


async def killed(target: Target, signum: int) -> ProcessEnded | None:
    """Wait until it is known how the target's process ended; None if not by this signal."""
    how, status = await target.ended()
    # where nothing tells by which signal it went: from this one there is no way back
    is_gone = how == "gone" and signum == signal.SIGKILL
    if is_gone or (how in ("killed", "dumped") and status == osprocess.signal_name(signum)):
        return ended(target, how, status)
    return None


def ended(target: Target, how: str, status: str) -> ProcessEnded:
    """Evidence that the target's process ended in this way."""
    seen_ns = target.exited_ns
    return ProcessEnded(subject=target.process, source="its parent", observed_ns=seen_ns, how=how, status=status)
