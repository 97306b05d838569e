"""References for the phases of a recovery: how long the plain operation alone takes.

The constants were measured on two cores of a cloud machine with torch 2.13 and gloo over loopback; they are for scale,
not for judging, and a faster machine takes less.
"""

from __future__ import annotations

from chaoskit.vocabulary import EXITED, HUNG, LOG_RULE

_NOTICE_S = {"stopped": 0.0003, "raised": 0.0003, EXITED: 0.0003}
_ABORT_S = 0.0015  # shutting down a gloo group's sockets until every rank is out
_GROUP_S = 0.0035  # building a bare gloo group of four ranks
_BYTES_PER_S = {"shared memory": 10e9, "tcp": 3e9}  # one memory copy; loopback


def detected(cause: str, step_s: float) -> tuple[float, str]:
    """From fault to notice."""
    if cause in _NOTICE_S:
        return _NOTICE_S[cause], "the kernel wakes a waiting futex or parent"
    if cause == HUNG:
        return step_s, "only a missed step tells a hang from a slow step"
    if cause == LOG_RULE:
        return 0.0, "a rule may fire at once, and needs as long as it was given"
    if cause in ("nonfinite", "corrupt"):
        return 0.0, "the check rides in the reduction of the same step"
    return 0.0, "a closed connection is noticed at once"


def quiesced() -> tuple[float, str]:
    return _ABORT_S, "sockets shut down, every rank out of its collective"


def regrouped() -> tuple[float, str]:
    return _GROUP_S, "one connection between every two ranks"


def restored(size_bytes: int, transport: str) -> tuple[float, str]:
    """To bring a joiner's state."""
    if size_bytes == 0:
        return 0.0, "no rank needs state"
    rate = _BYTES_PER_S.get(transport, _BYTES_PER_S["tcp"])
    return (
        size_bytes / rate,
        f"{size_bytes / 1e6:.0f} MB through {transport} at {rate / 1e9:g} GB/s",
    )


def first_good_step(step_s: float, world: int, nodes: int) -> tuple[float, str]:
    """To train the interrupted step."""
    return step_s, "one step" if world == nodes else f"one step, with {world} of {nodes} ranks"
