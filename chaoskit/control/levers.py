"""What a node does to the copies that it keeps when a fault orders it, and what it reads back from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaoskit.checkpoint.breakpoints import Breakpoints
from chaoskit.errors import ChaoskitError
from chaoskit.messages import Lever, LeverPulled, Message

#: By name: takes the keeper and the options; returns what is there now, in words, and whether the act took effect.
_LEVERS: dict[str, Callable[[Any, dict[str, Any]], tuple[str, bool]]] = {}


class NodeLevers:
    """Pulls each lever once, however often it is ordered, and reports. For the thread of a keeper.

    Args:
        tell: takes a message to the coordinator; called on any thread.
    """

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._pulled: dict[str, LeverPulled] = {}  # by fault
        self._broken: set[str] = set()  # faults whose breakpoint was set

    def pull(self, keeper: Any, fault: str, lever: Lever) -> None:
        """Do it, or say again what it did."""
        if lever.act == "break":
            self._break(keeper.breakpoints, fault, str(lever.options["place"]))
            return
        if fault not in self._pulled:
            act = _LEVERS.get(lever.act)
            if act is None:
                raise ChaoskitError(f"unknown lever {lever.act!r} of a node")
            observed, effective = act(keeper, lever.options)
            self._pulled[fault] = LeverPulled("", fault, observed, effective)
        self._tell(self._pulled[fault])

    def _break(self, breakpoints: Breakpoints, fault: str, place: str) -> None:
        """Takes effect later, when a thread gets there; then it is reported once more."""
        if fault not in self._broken:
            self._broken.add(fault)
            breakpoints.set(place, lambda seen: self._tell(LeverPulled("", fault, seen, effective=True)))
        self._tell(LeverPulled("", fault, f"a breakpoint is set at {place!r}", effective=False))
