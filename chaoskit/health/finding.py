"""How findings are made: a value beside its limits."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from chaoskit.wire.messages import Finding


def at_most(
    what: str,
    value: float,
    *,
    warn: float = math.inf,
    bad: float = math.inf,
    remedy: str = "",
    detail: str = "",
) -> Finding:
    """``value`` should not be above ``warn``, and must not be above ``bad``. NaN is above everything."""
    if not value <= bad:
        return Finding(what, "bad", value, bad, detail, remedy)
    if not value <= warn:
        return Finding(what, "warn", value, warn, detail, remedy)
    least = min(warn, bad)
    return Finding(what, "ok", value, least if math.isfinite(least) else "", detail)


def at_least(
    what: str,
    value: float,
    *,
    warn: float = -math.inf,
    bad: float = -math.inf,
    remedy: str = "",
    detail: str = "",
) -> Finding:
    """``value`` should not be below ``warn``, and must not be below ``bad``. NaN is below everything."""
    if not value >= bad:
        return Finding(what, "bad", value, bad, detail, remedy)
    if not value >= warn:
        return Finding(what, "warn", value, warn, detail, remedy)
    most = max(warn, bad)
    return Finding(what, "ok", value, most if math.isfinite(most) else "", detail)


def good(what: str, value: float | str, detail: str = "") -> Finding:
    """Nothing is wrong with it."""
    return Finding(what, "ok", value, "", detail)


def warned(what: str, value: float | str, remedy: str, detail: str = "") -> Finding:
    """Worth a look, and no reason to keep the node out."""
    return Finding(what, "warn", value, "", detail, remedy)


def bad(what: str, value: float | str, remedy: str, detail: str = "") -> Finding:
    """A reason to keep the node out."""
    return Finding(what, "bad", value, "", detail, remedy)


def of_node(node: str, findings: Iterable[Finding]) -> list[Finding]:
    """The same, with the name of the node that they are about."""
    return [msgspec.structs.replace(one, node=node) for one in findings]
