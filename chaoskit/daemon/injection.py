"""Acts of faults on the copies that a node keeps, and reports of their effect.

-> ``daemon/copy_faults.py``: the damage. ``checkpoint/disk/breakpoints.py``: the breakpoints.
-> ``faults/storage/copies.py``: which copies, and which evidence a fault needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.daemon.copy_faults import KeptCopy, damage, newest
from chaoskit.errors import ChaoskitError
from chaoskit.wire.messages import ActReport, InjectionAct


class InjectionTarget(Protocol):
    """The interface of a keeper for acts.

    Attributes:
        breakpoints: breakpoints of the threads that copy and store here.
    """

    breakpoints: Breakpoints

    def kept_copies(self, worker: str) -> list[KeptCopy]:
        """Return the complete copies of ``worker``'s state or piece, in all tiers of the node."""

    def lacks_copy(self, worker: str, step: int) -> bool:
        """Return True if an act on copies of this step must wait, because they are on their way."""

    def drop_copies(self, copies: list[KeptCopy]) -> None:
        """Drop the given copies, so that no restore can use them."""


#: A description of the copies after an act, and True if the act took effect.
Outcome = tuple[str, bool]


def _corrupt(_: InjectionTarget, copies: list[KeptCopy], options: dict[str, Any]) -> Outcome:
    """Damage the newest copies, or all of them if the option ``older`` is set.

    Return True in the outcome if none of these matches its seal any more.
    """
    damages = [
        damage(copy, options["how"]) for copy in (copies if options["older"] else newest(copies))
    ]
    return "; ".join(description for description, _ in damages), all(
        changed for _, changed in damages
    )


def _lose(keeper: InjectionTarget, copies: list[KeptCopy], options: dict[str, Any]) -> Outcome:
    """Drop copies, and return True in the outcome if all their memory is gone."""
    inodes = {copy.inode for copy in copies}
    keeper.drop_copies(copies)
    kept_inodes = [
        copy.inode
        for copy in keeper.kept_copies(options["worker"])
        if copy.tier in options["tiers"]
    ]
    # copies that the owner has sent again meanwhile are in other memory
    left = inodes.intersection(kept_inodes)
    return f"dropped {', '.join(map(str, copies))}; {len(left)} of these are left", not left


#: Acts by name. An act gets the copies that its options name, when those of the named step are
#: complete.
_ACTS: dict[str, Callable[[InjectionTarget, list[KeptCopy], dict[str, Any]], Outcome]] = {
    "corrupt_copies": _corrupt,
    "lose_copies": _lose,
}


class DaemonActs:
    """Carries out each act once, however often it is ordered, and reports it.

    For the thread of a keeper. An act on copies that are still on their way is not carried out, and
    nothing is reported: it must be ordered again.

    Args:
        node: name of the node.
        report: sends a report to the harness; called on any thread.
    """

    def __init__(self, node: str, report: Callable[[ActReport], None]) -> None:
        self._node, self._report = node, report
        self._reports: dict[str, ActReport] = {}  # report of each fault's act
        self._breakpoint_faults: set[str] = set()  # faults whose breakpoint was set

    def carry_out(self, keeper: InjectionTarget, fault: str, ordered: InjectionAct) -> None:
        """Carry out an act and report its outcome, or report the outcome again.

        Nothing happens while the copies of the act are still on their way. If this node keeps none
        of them, the report says so, and the act has no effect.

        Args:
            keeper: the keeper of this node's copies.
            fault: identifier of the fault, which orders one act.
            ordered: name and options of the act.

        Raises:
            ChaoskitError: if the act is unknown.
            OSError: if the memory of a copy is gone.
        """
        options = ordered.options
        if ordered.name == "break":
            self._break(keeper.breakpoints, fault, str(options["place"]))
            return
        if fault not in self._reports:
            act = _ACTS.get(ordered.name)
            if act is None:
                raise ChaoskitError(f"unknown act {ordered.name!r} of a node")
            if keeper.lacks_copy(options["worker"], options["step"]):
                return
            copies = [
                copy
                for copy in keeper.kept_copies(options["worker"])
                if copy.tier in options["tiers"]
            ]
            no_copies = f"keeps no copy of {options['worker']}"
            observed, effective = act(keeper, copies, options) if copies else (no_copies, False)
            self._reports[fault] = ActReport(
                "", fault, f"{self._node}: {observed}", effective, self._node
            )
        self._report(self._reports[fault])

    def _break(self, breakpoints: Breakpoints, fault: str, place: str) -> None:
        """Set a breakpoint, once for each fault, and report each time that it is set.

        The fault takes effect when a thread reaches it, which is reported then.
        """
        if fault not in self._breakpoint_faults:
            self._breakpoint_faults.add(fault)
            breakpoints.set(
                place,
                lambda description: self._report(
                    ActReport("", fault, description, True, self._node)
                ),
            )
        self._report(ActReport("", fault, f"a breakpoint is set at {place!r}", False, self._node))
