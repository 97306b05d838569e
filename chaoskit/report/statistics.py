"""How sure recovery is, and how fast: what repeated experiments say together. Pure arithmetic over outcomes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from chaoskit.experiment.shrink.proportion import wilson_interval
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict

_P95_LEAST = 20  # values; of fewer, the nearest rank is the greatest one
#: What the plugin writes into the name of a test that it repeats: ``[repeat3]``, ``[forward-repeat3]``.
_REPEAT = re.compile(r"\[repeat\d+\]|-repeat\d+(?=[-\]])|(?<=\[)repeat\d+-")


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What some runs with faults say about recovery.

    A run recovered if its training went on after every incident, and ``assert_recovered`` did not deny it; see
    :attr:`Outcome.recovered`. What else failed it is counted in ``failed``. A run that is unknown says nothing about
    recovery, neither does one in which the harness broke, nor one whose test judges it by itself (``check=False``: it
    may be meant to fail); these are counted apart.

    Args:
        name: of the experiment, without the number of its repeat.
        job: with its options; empty where the runs have several.
        faults: the plan; empty where the runs have several.
        recovered, tried: of ``tried`` runs so many recovered.
        probability: the share that recovered; None where nothing was tried.
        low, high: its 95 % Wilson score interval; 0 and 1 where nothing was tried.
        failed: runs that failed, or whose test did, whether they recovered or not.
        unknown, errors, unclaimed: runs that count neither for nor against.
        p50_s, p95_s, max_s: seconds from injection to the first good step, over all ``recoveries`` of the runs that
            came back; None where there was none, p95_s where fewer than 20 were measured: it would be the maximum.
            Quantiles are measured values (nearest rank).
    """

    name: str
    job: str = ""
    faults: list[str] = []
    recovered: int
    tried: int
    probability: float | None = None
    low: float
    high: float
    failed: int = 0
    unknown: int = 0
    errors: int = 0
    unclaimed: int = 0
    recoveries: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    max_s: float | None = None

    @property
    def runs(self) -> int:
        """All runs of the experiment, whether they count or not."""
        return self.tried + self.unknown + self.errors + self.unclaimed


class Estimates(msgspec.Struct, frozen=True):
    """``experiments``: one a group of repeats, in the order in which they were first run. ``total``: all runs."""

    total: Estimate
    experiments: list[Estimate]

    @property
    def repeated(self) -> list[Estimate]:
        """The experiments that were run more than once."""
        return [one for one in self.experiments if one.runs > 1]

    def plain(self) -> Any:
        """For a JSON encoder."""
        return msgspec.to_builtins(self)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed (nearest rank: always a measured one).

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def estimate_recovery(outcomes: Iterable[Outcome]) -> Estimates:
    """The probability of recovery, over all outcomes and for each experiment. Runs without a fault are left out."""
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.faults:
            groups.setdefault(identity(outcome), []).append(outcome)
    everything = [outcome for group in groups.values() for outcome in group]
    return Estimates(
        _estimate("all experiments", everything),
        [
            msgspec.structs.replace(
                _estimate(title(group), group),
                job=group[0].job,
                faults=[fault.fault for fault in group[0].faults],
            )
            for group in groups.values()
        ],
    )


def identity(outcome: Outcome) -> tuple[object, ...]:
    """Equal for two runs of one experiment: all that was chosen but the seed and the name."""
    return (
        outcome.job,
        outcome.stack,
        outcome.substrate,
        outcome.nodes,
        outcome.spares,
        outcome.reduction,
        tuple(sorted((field, repr(value)) for field, value in outcome.settings.items())),
        tuple(fault.fault for fault in outcome.faults),
    )


def without_repeat(name: str) -> str:
    """The name of a test without the number of its repeat."""
    return _REPEAT.sub("", name)


def title(group: Sequence[Outcome]) -> str:
    """What the runs of one experiment are called: their name without the number of the repeat."""
    first, *others = dict.fromkeys(without_repeat(outcome.name) for outcome in group)
    return f"{first} (and {len(others)} other names)" if others else first


def _estimate(name: str, outcomes: Sequence[Outcome]) -> Estimate:
    claimed = [outcome for outcome in outcomes if outcome.claimed]
    known = [outcome for outcome in claimed if outcome.recovered is not None]
    recovered, tried = sum(bool(outcome.recovered) for outcome in known), len(known)
    errors = sum(outcome.verdict is Verdict.ERROR for outcome in claimed)
    low, high = wilson_interval(recovered, tried)
    seconds = [
        recovery.seconds
        for outcome in known
        if outcome.came_back
        for recovery in outcome.recoveries
    ]
    return Estimate(
        name=name,
        recovered=recovered,
        tried=tried,
        probability=recovered / tried if tried else None,
        low=low,
        high=high,
        failed=sum(outcome.result is Verdict.FAILED for outcome in claimed),
        unknown=len(claimed) - tried - errors,
        errors=errors,
        unclaimed=len(outcomes) - len(claimed),
        recoveries=len(seconds),
        p50_s=quantile(seconds, 0.5) if seconds else None,
        p95_s=quantile(seconds, 0.95) if len(seconds) >= _P95_LEAST else None,
        max_s=max(seconds, default=None),
    )
