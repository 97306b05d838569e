"""Signals to processes, and evidence of processes that ended or were stopped.

-> experiment/injection/job_follower.py: how the parent's record of an end becomes ``target.exit``.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence

from chaoskit.errors import NodeUnreachable
from chaoskit.faults.evidence import NodeGone, ProcessEnded, WholeNode
from chaoskit.faults.target import ProcessExit, Target
from chaoskit.process import linux
from chaoskit.substrate.core.processes import Process


def look_up(target: Target, node: str = "") -> list[Process]:
    """Return the present processes of a node, with the agent or the root of a command first.

    Raise ProcessLookupError if the node has none. The fault is then recorded as missed.

    Args:
        node: name of another node; "" for the target's.
    """
    node = node or target.node
    processes = target.cluster.node(node)
    if not processes:
        raise ProcessLookupError(f"{node} has no process any more")
    return processes


def signal_all(processes: Iterable[Process], signum: int) -> None:
    """Send a signal to each process that still exists.

    Raises NodeUnreachable if their node cannot be reached; ``may_have_acted`` is True if one of them
    has got the signal.
    """
    has_acted = False
    for process in processes:
        try:
            process.signal(signum)
            has_acted = True
        except ProcessLookupError:  # ended with its parent meanwhile
            continue
        except NodeUnreachable as error:
            error.may_have_acted |= has_acted
            raise


@contextlib.contextmanager
def continued_afterwards(target: Target, processes: Sequence[Process]) -> Iterator[None]:
    """Continue the stopped ones of ``processes`` when the ``with`` is left.

    Processes that are still stopped then, or whose node does not answer, are noted as left behind.
    If the run is killed, the guard of its undo log continues them.
    """
    undo = target.undo.plan(
        *(undo_entry for process in processes for undo_entry in process.kernel.undo_stop(process))
    )
    try:
        yield
    finally:
        if left := _continue(processes):
            target.left_behind += left
        else:
            undo.done()


def _continue(processes: Sequence[Process]) -> list[str]:
    """Continue each process, and return in words those that are stopped, or may be.

    A node that does not answer for one process may answer for the next.
    """
    reached, left = list[Process](), list[str]()
    for process in reversed(processes):  # the agent last: it finds its workers running
        try:
            signal_all([process], signal.SIGCONT)
            reached.append(process)
        except NodeUnreachable as error:
            left.append(f"process {process.pid} may be stopped: {error}")
    for process in reached:
        try:
            if process.is_stopped():
                left.append(f"process {process.pid} is stopped")
        except NodeUnreachable as error:
            left.append(f"process {process.pid} may be stopped: {error}")
    return left


def gone(processes: Sequence[Process], node: str) -> NodeGone | None:
    """Return evidence that none of these processes of a node is left; None if some are.

    ``processes`` has at least one, the root of the node first.
    """
    if not all(process.is_gone() for process in processes):
        return None
    first = "the agent" if processes[0].name.startswith("ck-") else processes[0].name
    pids = tuple(process.pid for process in processes)
    return NodeGone(
        subject=WholeNode(node), source="the kernel's list of processes", first=first, pids=pids
    )


async def all_gone(target: Target, processes: Sequence[Process]) -> NodeGone:
    """Wait until none of these processes of the target's node is left.

    It does not return if the run ends first, or if the job ended by itself before.
    """
    return await target.seen(lambda: None if target.ended_well else gone(processes, target.node))


async def killed(target: Target, signum: int) -> ProcessEnded | None:
    """Wait for the end of the target's process, and return evidence that this signal ended it.

    Return None if it ended by another signal or with a status. For SIGKILL, a process that is just
    gone is evidence, too.
    """
    process_exit = await target.ended()
    # the signal of a process that is just gone is unknown, but SIGKILL is always fatal
    is_gone = process_exit.how == "gone" and signum == signal.SIGKILL
    by_signal = process_exit.how in ("killed", "dumped")
    if is_gone or (by_signal and process_exit.status == linux.signal_name(signum)):
        return ended(target, process_exit)
    return None


def ended(target: Target, process_exit: ProcessExit) -> ProcessEnded:
    """Return evidence that the target's process ended in this way, as its parent saw."""
    return ProcessEnded(
        subject=target.rank_process,
        source="its parent",
        observed_ns=target.exited_ns,
        how=process_exit.how,
        status=process_exit.status,
    )
