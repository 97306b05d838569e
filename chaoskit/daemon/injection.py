"""What a node does to the copies that it keeps when a fault orders it, and what it reads back from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.daemon.copy_faults import KeptCopy, damage, newest
from chaoskit.errors import ChaoskitError
from chaoskit.wire.messages import ActReport, InjectionAct


class KeepsCopies(Protocol):
    """What acts need of a keeper.

    Attributes:
        breakpoints: of the threads that copy and store here.
    """

    breakpoints: Breakpoints

    def kept(self, worker: str) -> list[KeptCopy]:
        """Complete copies of what ``worker`` holds, in every tier of this node."""

    def owes(self, worker: str, step: int) -> bool:
        """Whether a copy of this step is still to come here, or on its way from here to a partner."""

    def lose(self, copies: list[KeptCopy]) -> None:
        """Forget these."""


Seen = tuple[str, bool]  # what is there now, in words, and whether the act took effect


def _corrupt(_: KeepsCopies, copies: list[KeptCopy], options: dict[str, Any]) -> Seen:
    told = [
        damage(copy, options["how"]) for copy in (copies if options["older"] else newest(copies))
    ]
    return "; ".join(words for words, _ in told), all(changed for _, changed in told)


def _lose(keeper: KeepsCopies, copies: list[KeptCopy], options: dict[str, Any]) -> Seen:
    before = {copy.memory for copy in copies}
    keeper.lose(copies)
    kept = [copy.memory for copy in keeper.kept(options["worker"]) if copy.tier in options["tiers"]]
    left = before.intersection(kept)  # what its owner has brought again meanwhile lies elsewhere
    return f"dropped {', '.join(map(str, copies))}; {len(left)} of these are left", not left


#: By name: each gets the copies that the options are about, when those of the step that these name are complete.
_ACTS: dict[str, Callable[[KeepsCopies, list[KeptCopy], dict[str, Any]], Seen]] = {
    "corrupt_copies": _corrupt,
    "lose_copies": _lose,
}


class DaemonActs:
    """Does each act once, however often it is ordered, and reports. For the thread of a keeper.

    An act on copies that are still on their way is not done, and nothing is reported: it is to be ordered again.

    Args:
        tell: takes the report to the harness; called on any thread.
    """

    def __init__(self, node: str, tell: Callable[[ActReport], None]) -> None:
        self._node, self._tell = node, tell
        self._done: dict[str, ActReport] = {}  # by fault
        self._broken: set[str] = set()  # faults whose breakpoint was set

    def carry_out(self, keeper: KeepsCopies, fault: str, ordered: InjectionAct) -> None:
        """Do it, or say again what it did."""
        options = ordered.options
        if ordered.name == "break":
            self._break(keeper.breakpoints, fault, str(options["place"]))
            return
        if fault not in self._done:
            act = _ACTS.get(ordered.name)
            if act is None:
                raise ChaoskitError(f"unknown act {ordered.name!r} of a node")
            if keeper.owes(options["worker"], options["step"]):
                return
            found = [
                copy for copy in keeper.kept(options["worker"]) if copy.tier in options["tiers"]
            ]
            nothing = f"keeps no copy of {options['worker']}"
            observed, effective = act(keeper, found, options) if found else (nothing, False)
            self._done[fault] = ActReport(
                "", fault, f"{self._node}: {observed}", effective, self._node
            )
        self._tell(self._done[fault])

    def _break(self, breakpoints: Breakpoints, fault: str, place: str) -> None:
        """Takes effect later, when a thread gets there; then it is reported once more."""
        if fault not in self._broken:
            self._broken.add(fault)
            breakpoints.set(
                place, lambda seen: self._tell(ActReport("", fault, seen, True, self._node))
            )
        self._tell(ActReport("", fault, f"a breakpoint is set at {place!r}", False, self._node))
