"""Time from a planned change of the world's size to the next step of the ranks that stay."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from random import Random
from statistics import median

from benchmarks.harness.bars import Bar, quantile
from benchmarks.harness.lab import Lab, records, show_progress
from benchmarks.recoveries.recovery import durations, unchanged
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.journal import Record
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event
from faults import Fault, Scale, TakeSpot

#: What a move may take beside the step that the new world takes anyhow.
SHRINK_S, GROW_S = 0.1, 0.3
STORM_RESIZES, STORM_STEPS = 50, 200

_POLICY = ElasticPolicy(min_replicas=2, max_replicas=4, scaling_timeout_s=0)
#: The first growth of a run may meet pages that no step has touched, so a run goes down and up several times.
_CYCLE = 24
_CYCLES = 4


def resizing(lab: Lab) -> list[Bar]:
    """Resize the world of four to three and back on request, then as often as every fourth step."""
    return [*_one_node(lab), *_storm(lab), *_drain(lab)]


def _one_node(lab: Lab) -> list[Bar]:
    cycles = 1 if lab.smoke else _CYCLES
    faults: list[Fault] = []
    for start in range(_CYCLE, (cycles + 1) * _CYCLE, _CYCLE):
        faults += [Scale(to=3, at_step=start), Scale(to=4, at_step=start + _CYCLE // 2)]
    steps = (cycles + 1) * _CYCLE + _CYCLE // 2
    outcomes = [
        lab.run(*faults, steps=steps, twin=True, spares=0, shards=4, elastic=_POLICY)
        for _ in range(lab.repeats(2))
    ]
    moves = [move for outcome in outcomes for move in stops(outcome)]
    shrinks = [(stop_s, SHRINK_S) for before, after, stop_s in moves if after < before]
    grows = [(stop_s, GROW_S) for before, after, stop_s in moves if after > before]
    for before, after, stop_s in moves:
        show_progress(f"    {before} -> {after}: {stop_s * 1e3:.0f} ms")
    name = (
        "{} by one of four nodes on request: the ranks that stay stop beside the step that follows"
    )
    return [
        durations("resizing", name.format("shrink"), shrinks, f"{SHRINK_S * 1e3:.0f} ms"),
        durations("resizing", name.format("growth"), grows, f"{GROW_S * 1e3:.0f} ms"),
        _ordinary(outcomes),
        unchanged(
            "resizing",
            "shrink and growth on request: nothing lost, same losses and weights",
            outcomes,
        ),
    ]


def _ordinary(outcomes: list[Outcome]) -> Bar:
    """Return the bar on steps without a move, to compare stops with.

    Ranks that share two cores have long and short steps without any move.
    """
    worlds = sorted(
        {world for outcome in outcomes for world in ordinary_steps(outcome)}, reverse=True
    )
    parts = []
    for world in worlds:
        seconds = [
            second for outcome in outcomes for second in ordinary_steps(outcome).get(world, [])
        ]
        beside_ms = [(quantile(seconds, q) - median(seconds)) * 1e3 for q in (0.75, 0.95)]
        parts.append(
            f"{world} ranks {median(seconds) * 1e3:.0f} ms, +{beside_ms[0]:.0f} / +{beside_ms[1]:.0f} ms"
        )
    return Bar(
        topic="resizing",
        name="steps without a move, and what they take beside their median (p75 / p95)",
        measured="; ".join(parts),
        limit="–",
        met=None,
    )


def _storm(lab: Lab) -> list[Bar]:
    """Resize at random, never to the current size, so that each request is a move if there is time.

    Batches are larger than usual.
    """
    random, size, faults = Random(6), 4, list[Fault]()
    for step in range(2, STORM_STEPS - 2, STORM_STEPS // STORM_RESIZES):
        size = random.choice([choice for choice in _POLICY.sizes if choice != size])
        faults.append(Scale(to=size, at_step=step))
    outcome = lab.run(
        *faults[: 5 if lab.smoke else None],
        steps=30 if lab.smoke else STORM_STEPS,
        options={"size": lab.size, "batch": 24},
        twin=True,
        spares=0,
        shards=4,
        elastic=_POLICY,
    )
    moves = len(stops(outcome))
    ledger = outcome.ledger
    once = ledger is not None and not ledger.missing and not ledger.repeated
    same = unchanged("resizing", "", [outcome]).met
    parts = [
        f"{moves} moves",
        f"{outcome.lost_steps} steps lost",
        f"samples {'each once' if once else 'not each once'}",
        "bit-equal" if same else "not bit-equal",
        *outcome.reasons[:3],
    ]
    return [
        Bar(
            topic="resizing",
            name=f"{len(faults)} resizes asked for in a run of {STORM_STEPS} steps, to 2, 3 or 4 nodes at random",
            measured=", ".join(parts),
            limit="none lost, each sample once, bit-equal to the unbroken run",
            met=bool(same and once and outcome.lost_steps == 0),
            timed=False,
            samples={
                "moves": moves,
                "sizes": [fault.to for fault in faults if isinstance(fault, Scale)],
            },
        )
    ]


def _drain(lab: Lab) -> list[Bar]:
    ranks = (2, 0, 3, 1, 2)[: lab.repeats(5)]
    outcomes = [
        lab.run(
            TakeSpot(rank=rank, grace_s=1.0, at_step=20),
            steps=60,
            twin=True,
            spares=0,
            shards=4,
            elastic=_POLICY,
        )
        for rank in ranks
    ]
    lost = sum(
        1 for outcome in outcomes for record in records(outcome) if record.event == Event.DETECTED
    )
    missing = sum(
        len(outcome.ledger.missing) + len(outcome.ledger.repeated)
        for outcome in outcomes
        if outcome.ledger is not None
    )
    bar = unchanged(
        "resizing", "a node is taken a second after its notice: nothing lost, same losses", outcomes
    )
    counted = f"{lost} ranks given up, {missing} shards missing or taken twice"
    return [
        Bar(
            topic="resizing",
            name=bar.name,
            measured=f"{bar.measured}; {counted}",
            limit=bar.limit,
            met=bool(bar.met) and not lost and not missing,
            timed=False,
        )
    ]


def ordinary_steps(outcome: Outcome) -> dict[int, list[float]]:
    """Return the seconds between two commits of a worker in the same generation, by world size."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for commits in _commits(outcome).values():
        for before, after in pairwise(commits):
            if before["generation"] == after["generation"]:
                seconds[after["world"]].append((after.t_ns - before.t_ns) / 1e9)
    return seconds


def stops(outcome: Outcome) -> list[tuple[int, int, float]]:
    """Return every move without a loss: the size before and after, and the longest stop in seconds
    of a rank that stayed.

    A stop is the time between two commits of a worker in two generations, less the median step of
    the new world.
    """
    typical = {world: median(seconds) for world, seconds in ordinary_steps(outcome).items()}
    moves: dict[int, tuple[int, int, float]] = {}
    for commits in _commits(outcome).values():
        for before, after in pairwise(commits):
            if before["generation"] != after["generation"] and before["world"] != after["world"]:
                stop_s = (after.t_ns - before.t_ns) / 1e9 - typical.get(after["world"], 0.0)
                recorded = moves.get(after["generation"])
                longest_s = max(stop_s, recorded[2]) if recorded else stop_s
                moves[after["generation"]] = (before["world"], after["world"], longest_s)
    return [moves[generation] for generation in sorted(moves)]


def _commits(outcome: Outcome) -> dict[str, list[Record]]:
    """Return the commits of each worker, in order."""
    commits: dict[str, list[Record]] = defaultdict(list)
    for record in records(outcome):
        if record.event == Event.COMMIT:
            commits[record.source].append(record)
    return commits
