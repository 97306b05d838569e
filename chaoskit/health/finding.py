"""Construction of findings: a value beside its limits, of severity ``ok``, ``warn`` or ``bad``.

-> ``wire/messages/fitness.py``: the class Finding. ``health/verdict.py``: what a severity means.
"""

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
    """Return a finding that is bad if ``value`` is above ``bad``, and a warning above ``warn``.

    NaN is above every limit.

    Args:
        what: name of the value, such as ``disk.write_ms``.
        warn, bad: limits; infinite for none. The finding has the one that was exceeded, or else the
            lower one.
        remedy: advice if the value is above a limit; an ok finding has none.
        detail: further text for people.
    """
    if not value <= bad:
        return Finding(what, "bad", value, bad, detail, remedy)
    if not value <= warn:
        return Finding(what, "warn", value, warn, detail, remedy)
    lower_limit = min(warn, bad)
    return Finding(what, "ok", value, lower_limit if math.isfinite(lower_limit) else "", detail)


def at_least(
    what: str,
    value: float,
    *,
    warn: float = -math.inf,
    bad: float = -math.inf,
    remedy: str = "",
    detail: str = "",
) -> Finding:
    """Return a finding that is bad if ``value`` is below ``bad``, and a warning below ``warn``.

    NaN is below every limit. The arguments are those of :func:`at_most`; an ok finding has the
    higher limit.
    """
    if not value >= bad:
        return Finding(what, "bad", value, bad, detail, remedy)
    if not value >= warn:
        return Finding(what, "warn", value, warn, detail, remedy)
    upper_limit = max(warn, bad)
    return Finding(what, "ok", value, upper_limit if math.isfinite(upper_limit) else "", detail)


def good(what: str, value: float | str, detail: str = "") -> Finding:
    """Return an ok finding, which has no limit."""
    return Finding(what, "ok", value, "", detail)


def warned(what: str, value: float | str, remedy: str, detail: str = "") -> Finding:
    """Return a finding that deserves a look, but does not keep the node out."""
    return Finding(what, "warn", value, "", detail, remedy)


def bad(what: str, value: float | str, remedy: str, detail: str = "") -> Finding:
    """Return a finding that keeps the node out."""
    return Finding(what, "bad", value, "", detail, remedy)


def of_node(node: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with the name of the node that they are about."""
    return [msgspec.structs.replace(finding, node=node) for finding in findings]
