"""Time from a node's silence to the next step of the other nodes, and until the node trains
again.
"""

from __future__ import annotations

from benchmarks.harness.bars import Bar
from benchmarks.harness.lab import Lab, records, show_progress
from benchmarks.recoveries.recovery import PLACES, durations, unchanged
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate import registry
from chaoskit.vocabulary import Event
from faults import Cut, Fault

#: Three missed heartbeats of 50 ms.
LEASE_S = 0.15
#: What silence may cost beside the step that is repeated.
GRACE_S = 0.5
#: From the healing to the first step of the full world.
REJOIN_S = 1.0

_STRIKE, _STEPS, _STEPS_TO_HEAL = 24, 40, 60
_HEAL_S = 2.0


def network(lab: Lab) -> list[Bar]:
    """Measure the loss of all packets to and from one node, without a reset.

    The lab has a substrate of its own, since the nodes of the other labs have no networks.
    """
    places = PLACES[: lab.repeats(len(PLACES))]
    with Lab(smoke=lab.smoke, directory=lab.directory, substrate=registry.NETNS) as apart:
        show_progress("  a node is cut off, a warm spare")
        cuts: list[Fault] = [Cut(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places]
        spared = [apart.run(fault, steps=_STEPS, twin=True) for fault in cuts]
        show_progress("  a node is cut off, and heals")
        heals: list[Fault] = [
            Cut(rank=rank, at_step=_STRIKE, phase=phase, heal_after_s=_HEAL_S)
            for rank, phase in places
        ]
        healed = [
            apart.run(fault, steps=_STEPS_TO_HEAL, twin=True, spares=0) for fault in heals[:5]
        ]
        return [
            _detection(spared),
            _next_step(spared),
            unchanged(
                "network", "silent cut, a warm spare: nothing lost, same losses and weights", spared
            ),
            _rejoining(healed),
            unchanged(
                "network", "silent cut, healed: nothing lost, same losses and weights", healed
            ),
        ]


def _detection(outcomes: list[Outcome]) -> Bar:
    pairs = [
        (span.seconds, LEASE_S)
        for outcome in outcomes
        for span in outcome.recoveries[0].spans
        if span.name == "detected"
    ]
    return durations("network", "silent cut: the node is given up", pairs, "3 leases missed")


def _next_step(outcomes: list[Outcome]) -> Bar:
    recoveries = [outcome.recoveries[0] for outcome in outcomes]
    pairs = [(recovery.seconds, recovery.step_seconds + GRACE_S) for recovery in recoveries]
    return durations(
        "network", "silent cut: every rank's next step", pairs, f"a step + {GRACE_S * 1e3:.0f} ms"
    )


def _rejoining(outcomes: list[Outcome]) -> Bar:
    name = "silent cut, no spare: from the healing to the first step of the full world"
    rejoined = [(outcome, rejoining_s(outcome)) for outcome in outcomes]
    pairs = [(seconds, REJOIN_S) for _, seconds in rejoined if seconds is not None]
    if len(pairs) < len(rejoined):
        missing = f"never in {len(rejoined) - len(pairs)} of {len(rejoined)} runs"
        return Bar(
            topic="network",
            name=name,
            measured=missing,
            limit="in all runs",
            met=False,
            timed=False,
        )
    return durations("network", name, pairs, f"{REJOIN_S:g} s")


def rejoining_s(outcome: Outcome) -> float | None:
    """Return the seconds from the end of the fault until all ranks have committed a step
    together.
    """
    journal = records(outcome)
    healed_ns = max(
        (record.t_ns for record in journal if record.event == Event.LIFTED), default=None
    )
    if healed_ns is None:
        return None
    for point in outcome.steps:
        commits = [r.t_ns for r in journal if r.event == Event.COMMIT and r["step"] == point.step]
        if point.world == outcome.nodes and commits and max(commits) > healed_ns:
            return (max(commits) - healed_ns) / 1e9
    return None
