"""Reference durations for the phases of a recovery: the time that the plain operation alone takes.

The constants were measured on two cores of a cloud machine with torch 2.13 and gloo over loopback.
They are for scale, not for judging; a faster machine takes less.

-> experiment/run/recovery_timeline.py (_spans): the measured phases beside which they are shown.
"""

from __future__ import annotations

from chaoskit.vocabulary import EXITED, HUNG, LOG_RULE

_NOTICE_S = {"stopped": 0.0003, "raised": 0.0003, EXITED: 0.0003}
_ABORT_S = 0.0015  # shutting down a gloo group's sockets until every rank is out
_GROUP_S = 0.0035  # building a bare gloo group of four ranks
_BYTES_PER_S = {"shared memory": 10e9, "tcp": 3e9}  # one memory copy; loopback


def detected(cause: str, step_s: float) -> tuple[float, str]:
    """Return the reference from fault to detection, in seconds, and its explanation."""
    if cause in _NOTICE_S:
        return _NOTICE_S[cause], "the kernel wakes a waiting futex or parent"
    if cause == HUNG:
        return step_s, "a hang differs from a slow step only by a missed step"
    if cause == LOG_RULE:
        return 0.0, "a rule may fire at once, and needs as long as it was given"
    if cause in ("nonfinite", "corrupt"):
        return 0.0, "the check is part of the reduction of the same step"
    return 0.0, "a closed connection is noticed at once"


def quiesced() -> tuple[float, str]:
    """Return the reference in seconds for leaving the collective, and its explanation."""
    return _ABORT_S, "sockets shut down, every rank out of its collective"


def regrouped() -> tuple[float, str]:
    """Return the reference for a new group, in seconds, and its explanation."""
    return _GROUP_S, "one connection between every two ranks"


def restored(size_bytes: int, transport: str) -> tuple[float, str]:
    """Return the reference in seconds for the restore of a joining rank, and its explanation."""
    if size_bytes == 0:
        return 0.0, "no rank needs state"
    bytes_per_s = _BYTES_PER_S.get(transport, _BYTES_PER_S["tcp"])
    return (
        size_bytes / bytes_per_s,
        f"{size_bytes / 1e6:.0f} MB through {transport} at {bytes_per_s / 1e9:g} GB/s",
    )


def first_good_step(step_s: float, world: int, nodes: int) -> tuple[float, str]:
    """Return the reference for the interrupted step, in seconds, and its explanation."""
    return step_s, "one step" if world == nodes else f"one step, with {world} of {nodes} ranks"
