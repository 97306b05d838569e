"""A harmless act of each hand, which shows that its faults would work.

-> ``doctor.py`` chooses the pod. ``docs/architecture/hand.md``: the operations of hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from chaoskit.attach.hands.hand import Hand, HandRefused
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandRole
from chaoskit.attach.hands.pod_rules import count_of
from chaoskit.errors import HarnessError

_INIT = 1  # pid of the first process of a container
_STOP_S = 5.0
_RULE_S = 1.0
_CONNECT_S = 0.3
_WAIT_S = 5.0  # for what the kernel does within milliseconds, or after _RULE_S
_LOOK_S = 0.05
_TRACED = "t"  # state of a thread that a tracer has stopped
#: An address that belongs to no machine (RFC 5737), and a port without a meaning there.
_NO_MACHINE, _PORT = "192.0.2.1", 9


def try_hand(role: HandRole, hand: Hand) -> str:
    """Let a hand act in a throw-away pod, and return what was seen.

    Raises:
        HarnessError: if the act has failed, or its effect was not seen. It is HandUnable, with a
            remedy, if the kernel or a tool refuses.
    """
    return _TRIALS[role](hand)


def _try_processes(hand: Hand) -> str:
    """Stop the first process of the container by ptrace, and let it go on."""
    processes = hand.ask("list", variables=False)["processes"]
    init = next((process for process in processes if process["pid"] == _INIT), None)
    if init is None:
        raise HarnessError(f"{hand.name} does not see the first process of its target")
    identity = {"pid": _INIT, "ticks": init["ticks"]}
    stop = hand.ask("stop", **identity, lasts_s=_STOP_S)
    states = set(hand.ask("look", **identity).get("states", ()))
    if not stop["held"] or states != {_TRACED}:
        raise HarnessError(f"{hand.name}: the stopped process does not stand still: {stop}")
    hand.ask("lift", effect=stop["number"])

    def goes_on() -> bool:
        states = hand.ask("look", **identity).get("states", ())
        return bool(states) and _TRACED not in states

    _require(goes_on, f"{hand.name}: the process does not go on after its stop")
    return f"lists {len(processes)} processes; pid 1 stood still, and went on"


def _try_network(hand: Hand) -> str:
    """Drop packets to an address of no machine for a second."""
    rule = hand.ask("cut", addresses=[_NO_MACHINE], directions=["out"], lasts_s=_RULE_S)
    attempt = hand.ask("connect", address=_NO_MACHINE, port=_PORT, within_s=_CONNECT_S)
    count = count_of(hand.ask("counters", effect=rule["number"]))
    if not count:
        how = attempt.get("error", attempt["how"])
        raise HarnessError(f"{hand.name}: its rule has dropped no packet of a connection ({how})")

    def is_over() -> bool:
        try:
            hand.ask("counters", effect=rule["number"])
        except HandRefused:  # it has no such effect any more
            return True
        return False

    _require(is_over, f"{hand.name}: its rule does not end after {_RULE_S:g} s")
    if failed := hand.ask("sweep")["failed"]:
        raise HarnessError(f"{hand.name}: tables cannot be removed: {failed}")
    return f"a rule dropped {count} packets, and ended after {_RULE_S:g} s"


def _require(condition: Callable[[], bool], problem: str) -> None:
    """Wait until a condition is true. Raise HarnessError with the problem if it is not in time."""
    until_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise HarnessError(problem)
        time.sleep(_LOOK_S)


_TRIALS: Mapping[HandRole, Callable[[Hand], str]] = {
    PROCESSES: _try_processes,
    NETWORK: _try_network,
}
