"""What faults do to processes, and what they see of them: signals, processes that are gone or stand still."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence

from chaoskit.faults.evidence import NodeGone, ProcessEnded, WholeNode
from chaoskit.faults.target import Target
from chaoskit.process import linux
from chaoskit.substrate.core.processes import Process


def look_up(target: Target, node: str = "") -> list[Process]:
    """The processes of the target's node, or of another one, now: the agent first. Raises ProcessLookupError."""
    node = node or target.node
    processes = target.cluster.node(node)
    if not processes:
        raise ProcessLookupError(f"{node} has no process any more")
    return processes


def signal_all(processes: Iterable[Process], signum: int) -> None:
    """Send a signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # ended with its parent meanwhile
            process.signal(signum)


@contextlib.contextmanager
def continued_afterwards(target: Target, processes: Sequence[Process]) -> Iterator[None]:
    """Continue processes that are stopped in a ``with`` when it is left. If the run is killed, its guard does."""
    undo = target.undo.plan(*(entry for one in processes for entry in one.kernel.undo_stop(one)))
    try:
        yield
    finally:
        signal_all(
            reversed(processes), signal.SIGCONT
        )  # workers first: the agent finds them moving
        if left := [one for one in processes if one.is_stopped()]:
            target.left_behind.append(f"processes {[one.pid for one in left]} are stopped")
        else:
            undo.done()


def gone(processes: Sequence[Process], node: str) -> NodeGone | None:
    """Evidence that none of these processes of a node is left; None if some are."""
    if not all(process.is_gone() for process in processes):
        return None
    first = "the agent" if processes[0].name.startswith("ck-") else processes[0].name
    pids = tuple(process.pid for process in processes)
    return NodeGone(
        subject=WholeNode(node), source="the kernel's list of processes", first=first, pids=pids
    )


async def all_gone(target: Target, processes: Sequence[Process]) -> NodeGone:
    """Wait until none of these processes of the target's node is left, and the job did not end by itself before."""
    evidence = await target.seen(
        lambda: None if target.ended_well else gone(processes, target.node)
    )
    assert evidence is not None
    return evidence


async def killed(target: Target, signum: int) -> ProcessEnded | None:
    """Wait until it is known how the target's process ended; None if not by this signal."""
    how, status = await target.ended()
    # where nothing tells by which signal it went: from this one there is no way back
    is_gone = how == "gone" and signum == signal.SIGKILL
    if is_gone or (how in ("killed", "dumped") and status == linux.signal_name(signum)):
        return ended(target, how, status)
    return None


def ended(target: Target, how: str, status: str) -> ProcessEnded:
    """Evidence that the target's process ended in this way."""
    seen_ns = target.exited_ns
    return ProcessEnded(
        subject=target.rank_process,
        source="its parent",
        observed_ns=seen_ns,
        how=how,
        status=status,
    )
