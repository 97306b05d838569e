"""Tree of spans of a run: the run, its start-up, each recovery or resize, and their phases.

This module needs no tracing library.

-> observe/otel.py sends the spans or writes them to a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from chaoskit.journal import Record
from chaoskit.observe.follower import Follower
from chaoskit.runlog.account.setback import Setback

AttributeValue = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class Clock:
    """The relation of CLOCK_MONOTONIC to the wall clock.

    It follows from the start of the run, where both are known.
    """

    monotonic_ns: int
    unix_ns: int

    @staticmethod
    def of(started: Record) -> Clock:
        """Return the clock that the first record of the harness defines."""
        return Clock(started.t_ns, int(started["unix_ns"]))

    def unix(self, t_ns: int) -> int:
        """Return a moment on CLOCK_MONOTONIC as wall-clock ns since 1970."""
        return self.unix_ns + t_ns - self.monotonic_ns


@dataclass(slots=True)
class Span:
    """A span of time. Times are CLOCK_MONOTONIC in ns.

    Attributes:
        key: identifies the span in the run, and is the same whenever the run is read.
        moments: names and times of events inside the span.
        error: why it did not end well; "" if it did.
    """

    key: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    moments: list[tuple[str, int]] = field(default_factory=list)
    error: str = ""
    children: list[Span] = field(default_factory=list)


def run_span(follower: Follower, started: Record) -> Span:
    """Return the span of the run up to its newest record, without its children.

    Args:
        started: the first record of the harness; runs of older versions do not have it.
    """
    account = follower.account()
    attributes: dict[str, AttributeValue] = {
        "chaoskit.run": str(started["name"]),
        "chaoskit.nodes": int(started["nodes"]),
        "chaoskit.spares": int(started["spares"]),
        "chaoskit.steps": follower.accountant.step + 1,
        "chaoskit.goodput": account.goodput,
        "chaoskit.ettr_wall": account.ettr_wall,
        "chaoskit.ettr_productive": account.ettr_productive,
    }
    attributes |= {
        f"chaoskit.lost_s.{cause.replace(' ', '_')}": s for cause, s in account.lost_s.items()
    }
    end = follower.end
    error = str(end["reason"]) if end is not None and not end["ok"] else ""
    return Span(
        "run", f"train {started['name']}", started.t_ns, follower.last_ns, attributes, error=error
    )


def all_spans(follower: Follower, started: Record) -> Span:
    """Return the span of the run with all of its descendants.

    Args:
        started: see :func:`run_span`.
    """
    run, accountant = run_span(follower, started), follower.accountant
    if accountant.formed_ns is not None:
        run.children.append(Span("start-up", "start-up", run.begin_ns, accountant.formed_ns))
    run.children += [setback_span(setback) for setback in accountant.setbacks]
    if accountant.open is not None:
        run.children.append(setback_span(accountant.open, until_ns=run.end_ns))
    return run


def setback_span(setback: Setback, until_ns: int | None = None) -> Span:
    """Return the span of a recovery or a resize, with its phases one after the other.

    Its last phase may end after the first good step.

    Args:
        until_ns: the end of the run, if training did not recover from the setback. The span then
            has an error and a last phase up to this time. None for other setbacks.
    """
    kind = "resize" if setback.planned else "recovery"
    key = f"{kind}-{setback.noticed_ns}"
    phases = [
        Span(f"{key}-{name}", name, begin_ns, end_ns) for name, begin_ns, end_ns in setback.spans()
    ]
    error, end_ns = "", phases[-1].end_ns if phases else setback.noticed_ns
    if until_ns is not None:
        error, end_ns = "training did not recover", max(until_ns, end_ns)
        phases.append(
            Span(
                f"{key}-given up", "not recovered", phases[-1].end_ns if phases else end_ns, end_ns
            )
        )
    moments = [("planned" if setback.planned else "noticed", setback.noticed_ns)]
    moments += [("injected", setback.begun_ns)] if setback.fault else []
    return Span(
        key,
        kind,
        setback.begun_ns,
        end_ns,
        dict(_attributes(setback)),
        sorted(moments),
        error,
        phases,
    )


def _attributes(setback: Setback) -> Mapping[str, AttributeValue]:
    """Return the attributes of a recovery or a resize. Those without a value are left out."""
    attributes: dict[str, AttributeValue | None] = {
        "chaoskit.cause": setback.cause,
        "chaoskit.step": setback.step,
        "chaoskit.generation": setback.generation,
        "chaoskit.world_before": setback.world_before,
        "chaoskit.world": setback.world,
        "chaoskit.rank": setback.rank,
        "chaoskit.workers": setback.workers or None,
        "chaoskit.nodes": setback.nodes or None,
        "chaoskit.fault": setback.fault or None,
        "chaoskit.detail": setback.detail or None,
        "chaoskit.seconds_to_first_good_step": setback.seconds,
    }
    return {name: attribute for name, attribute in attributes.items() if attribute is not None}


def trace_id(started: Record) -> int:
    """Return a 128-bit id of the run, not 0. Each export of the run gets the same id."""
    seed = f"{started['name']} {started['unix_ns']} {started['pid']}"
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16]) or 1


def span_id(trace: int, key: str) -> int:
    """Return a 64-bit id of a span of the trace, not 0."""
    return int.from_bytes(hashlib.sha256(f"{trace} {key}".encode()).digest()[:8]) or 1
