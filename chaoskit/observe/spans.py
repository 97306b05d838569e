"""A run as a tree of spans: the run, its start-up, each recovery or resize, and their phases. Knows no library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from chaoskit.journal import Record
from chaoskit.observe.follow import Follower
from chaoskit.runlog.account.setback import Setback

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class Clock:
    """Ties CLOCK_MONOTONIC to the wall clock, by one moment of which both are known: the start of the run."""

    monotonic_ns: int
    unix_ns: int

    @staticmethod
    def of(started: Record) -> Clock:
        """From the first record of the harness."""
        return Clock(started.t_ns, int(started["unix_ns"]))

    def unix(self, t_ns: int) -> int:
        """Wall-clock ns since 1970 of a moment on CLOCK_MONOTONIC."""
        return self.unix_ns + t_ns - self.monotonic_ns


@dataclass(slots=True)
class Span:
    """Something that took time. Times are CLOCK_MONOTONIC in ns.

    ``key`` tells it from all others of the run, and is the same whenever the run is read. ``error``: why it did not
    end well. ``moments``: names of what happened inside.
    """

    key: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    moments: list[tuple[str, int]] = field(default_factory=list)
    error: str = ""
    children: list[Span] = field(default_factory=list)


def run_span(follower: Follower) -> Span:
    """The whole run up to now, without its children."""
    started, account = follower.started, follower.account()
    assert started is not None, "older runs are refused before"
    attributes: dict[str, Value] = {
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


def all_spans(follower: Follower) -> Span:
    """The run with everything in it."""
    run, accountant = run_span(follower), follower.accountant
    if accountant.formed_ns is not None:
        run.children.append(Span("start-up", "start-up", run.begin_ns, accountant.formed_ns))
    run.children += [setback_span(setback) for setback in accountant.setbacks]
    if accountant.open is not None:
        run.children.append(setback_span(accountant.open, until_ns=run.end_ns))
    return run


def setback_span(setback: Setback, until_ns: int | None = None) -> Span:
    """A recovery or a resize, with its phases one after the other.

    Args:
        until_ns: of one that training did not come back from: when it was given up.
    """
    kind = "resize" if setback.planned else "recovery"
    key = f"{kind}-{setback.noticed_ns}"
    phases = [
        Span(f"{key}-{name}", name, begin_ns, end_ns) for name, begin_ns, end_ns in setback.spans()
    ]
    error, end_ns = "", phases[-1].end_ns if phases else setback.noticed_ns
    if until_ns is not None:
        error, end_ns = "training did not come back from it", max(until_ns, end_ns)
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


def _attributes(setback: Setback) -> Mapping[str, Value]:
    told: dict[str, Value | None] = {
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
    return {name: value for name, value in told.items() if value is not None}


def trace_id(started: Record) -> int:
    """128 bits that name the run, not 0; the same whoever exports it, and how often."""
    seed = f"{started['name']} {started['unix_ns']} {started['pid']}"
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16]) or 1


def span_id(trace: int, key: str) -> int:
    """64 bits that name a span of the trace, not 0."""
    return int.from_bytes(hashlib.sha256(f"{trace} {key}".encode()).digest()[:8]) or 1
