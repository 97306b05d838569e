"""Properties of time: what must be noticed, borne, or over within a bound."""

from __future__ import annotations

import math
from collections import defaultdict

from chaoskit.experiment.properties import promised
from chaoskit.experiment.properties.base import SLACK_S, Finding, RunTrace
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.vocabulary import HUNG, SLOW, Event

_SETTLED_STEPS = (
    5  # before so many steps no durations are known, and a hang is found by the start-up limit only
)
_REGROUP_S = 1.0  # for each rank; measured: a few milliseconds
#: Kinds that end the process which decides membership.
_COORDINATOR_ENDS = ("KillCoordinator", "DeleteCoordinatorPod")


def abort(trace: RunTrace) -> Finding:
    """When a rank is lost, all others leave their collective long before it would time out by itself."""
    limit_s = trace.config.collective_timeout_s / 4
    found, seen = [], False
    groups: dict[str, list[Record]] = defaultdict(list)  # worker -> those it was in
    for record in trace.of(Event.REGROUPED):
        groups[record.source].append(record)
    for plan in trace.of(Event.PLAN):
        generation = plan["generation"]
        survivors = trace.members.get(generation - 1, {}).keys() & trace.members[generation].keys()
        if not plan["abort"] or generation == 1 or not survivors:
            continue
        seen = True
        due_ns = plan.t_ns + int(limit_s * 1e9)
        if due_ns > trace.end_ns:
            continue
        for worker in survivors:
            gone = trace.lost_ns.get(worker, math.inf) <= due_ns
            left = any(
                one["generation"] >= generation and one.t_ns <= due_ns
                for one in reversed(groups[worker])
            )
            if not gone and not left:
                found.append(f"{worker} was not in generation {generation} after {limit_s:g} s")
    return found if seen else None


def lease(trace: RunTrace) -> Finding:
    """A rank that makes no progress is given up within a few step times, however alive its process is."""
    hung = [
        one
        for one in trace.confirmed("Hang", "Deadlock")
        if getattr(one.fault, "how", "") != "skip"
    ]
    if not hung:
        return None
    found = []
    for strike in hung:
        target = _target(strike)
        # time without a CPU is no time of its phase
        limit_s = (
            trace.hang_limit_s(target.injected_ns) + promised.FOLLOW_S + SLACK_S + target.starved_s
        )
        if trace.steps_before(target.injected_ns) < _SETTLED_STEPS:
            limit_s += trace.config.startup_s
        lost_ns = trace.lost_ns.get(target.worker)
        if (trace.end_ns if lost_ns is None else lost_ns) - target.injected_ns > limit_s * 1e9:
            found.append(
                f"{target.worker} did not move, and was not given up within {limit_s:.1f} s"
            )
    return found


def slow_ranks(trace: RunTrace) -> Finding:
    """A rank that is slow within the limit is not given up for it."""
    floor_ms = trace.config.hang_floor_ms
    slow = [
        strike
        for strike in trace.confirmed("Straggle", "DataStall")
        if max(getattr(strike.fault, "delay_ms", 0.0), getattr(strike.fault, "stall_ms", 0.0))
        < floor_ms / 2
    ]
    return _kept(trace, slow, (HUNG,) if trace.config.slow_limit else (HUNG, SLOW))


def wall_clock(trace: RunTrace) -> Finding:
    """A wall clock that jumps has no consequence for its rank."""
    return _kept(trace, trace.confirmed("ClockJump"), ())


def _kept(trace: RunTrace, strikes: list[InjectionRecord], causes: tuple[str, ...]) -> Finding:
    """A rank that nothing else has struck is not given up (for one of ``causes``, where some are named)."""
    if not strikes:
        return None
    found = []
    for strike in strikes:
        worker = _target(strike).worker
        lost = [
            record
            for record in trace.of(Event.DETECTED)
            if record["worker"] == worker
            and (not causes or record["cause"] in causes)
            and strike.target is not None
            and strike.target.injected_ns < record.t_ns < trace.end_ns
        ]
        if (
            lost
            and trace.struck_by(worker) == [strike.fault.kind]
            and not _on_struck_node(trace, worker)
        ):
            found.append(
                f"{worker} was only struck by {strike.fault}, and given up: {lost[0]['cause']}"
            )
    return found


def _on_struck_node(trace: RunTrace, worker: str) -> bool:
    nodes = [one for one in trace.run.injections if one.fault.whole_node and not one.missed]
    struck = {node for one in nodes if one.target is not None for node in one.target.struck_nodes}
    struck.update(record["node"] for record in trace.of(Event.POD_TAKEN))
    return worker.rpartition(".")[0] in struck


def settles(trace: RunTrace) -> Finding:
    """Every membership that is not replaced by a newer one has all its groups within a time linear in its ranks."""
    plans = trace.of(Event.PLAN)
    found = []
    for number, plan in enumerate(plans):
        over_ns = plans[number + 1].t_ns if number + 1 < len(plans) else trace.end_ns
        settled_ns = min(trace.settled_ns.get(plan["generation"], over_ns), over_ns)
        limit_s = SLACK_S + _REGROUP_S * len(plan["members"])
        if plan["abort"] and settled_ns - plan.t_ns > limit_s * 1e9:
            found.append(f"generation {plan['generation']} did not settle within {limit_s:g} s")
    return found if plans else None


def coordinator_returns(trace: RunTrace) -> Finding:
    """When the coordinator is lost another one takes over before an agent gives up waiting for it."""
    killed = trace.confirmed(*_COORDINATOR_ENDS)
    if not killed:
        return None
    found = []
    for strike in killed:
        acted_ns = _killed_ns(strike)
        due_ns = acted_ns + int(trace.config.coordinator_outage_s * 1e9)
        resumed = trace.first(Event.RESUMED, acted_ns)
        if (resumed.t_ns if resumed else trace.end_ns) > due_ns:
            found.append(f"no coordinator took over within {trace.config.coordinator_outage_s:g} s")
        if resumed is None and trace.run.end is None:
            found.append("no coordinator took over, and the run did not end")
    return found


def _killed_ns(strike: InjectionRecord) -> int:
    """The act came no earlier: the rank was released first."""
    return _target(strike).injected_ns


def blind(trace: RunTrace) -> Finding:
    """Ranks commit steps while no coordinator watches them."""
    killed = trace.confirmed(*_COORDINATOR_ENDS)
    if not killed or len(trace.members) > 1:
        return None  # a world that loses a rank must wait for a coordinator
    found = []
    limit_ns = int((trace.config.hang_steps * trace.usual_step_s + SLACK_S) * 1e9)
    times_ns = sorted(record.t_ns for record in trace.of(Event.COMMIT, Event.FINISHED))
    for strike in killed:
        acted_ns = _killed_ns(strike)
        after_ns = next((t_ns for t_ns in times_ns if t_ns > acted_ns), trace.end_ns)
        if after_ns - acted_ns > limit_ns:
            found.append(
                f"no step was committed for {(after_ns - acted_ns) / 1e9:.1f} s after {strike.fault}"
            )
    return found


def recovery_limit_s(trace: RunTrace) -> float:
    """The limits that a recovery may run into, one after the other."""
    config = trace.config
    lease_s = config.heartbeat_ms * config.lease_beats / 1000
    restore_s = promised.HEALING_S + promised.RECALL_S + promised.GATHER_S
    silence_s = max(lease_s, promised.SLOW_AGENT_S)
    return (
        trace.hang_limit_s(trace.end_ns)
        + silence_s
        + promised.FOLLOW_S
        + promised.REATTACH_S
        + restore_s
        + SLACK_S
    )


def cost(trace: RunTrace) -> Finding:
    """However faults fall into the recoveries from other faults, k of them cost at most k times the bound."""
    if not trace.recoveries:
        return None
    spans = sorted((one.injected_s, one.injected_s + one.seconds) for one in trace.recoveries)
    total_s, until_s = 0.0, 0.0
    for start_s, end_s in spans:
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    early = any(
        one.target is not None and one.target.step < _SETTLED_STEPS for one in trace.run.injections
    )
    limit_s = len(spans) * (recovery_limit_s(trace) + trace.config.startup_s * early)
    return (
        [f"{len(spans)} losses cost {total_s:.1f} s, limit {limit_s:.1f} s"]
        if total_s > limit_s
        else []
    )


def corruption(trace: RunTrace) -> Finding:
    """A flipped bit of the state, or of what was received, is found within the steps that the settings promise."""
    found, seen = [], False
    last = max(trace.history.steps, default=-1)
    for strike in trace.confirmed("BitFlip"):
        target = _target(strike)
        within = _promised_steps(trace, target, str(getattr(strike.fault, "where", "")))
        if within is None or target.step + within > last:
            continue
        seen = True
        if trace.lost_ns.get(target.worker, math.inf) <= _finished_ns(trace, target.step + within):
            continue  # lost, for whatever reason, before the time was over
        named = [
            record
            for record in trace.of(Event.CORRUPT)
            if target.worker in (record["worker"], *record["sources"])
            and target.step <= record["step"] <= target.step + within
        ]
        if not named and not _was_restored(trace, target, target.step + within):
            found.append(f"{strike.fault} was not found by step {target.step + within}")
    return found if seen else None


def _finished_ns(trace: RunTrace, step: int) -> int:
    """When the last rank had finished ``step``; the end, if that is missing."""
    found = trace.history.steps.get(step)
    return max(record.t_ns for record in found.finishers) if found else trace.end_ns


def _was_restored(trace: RunTrace, target: Struck, step: int) -> bool:
    """Whether the rank took its piece from a copy before ``step`` was over, which may not have had the flip."""
    entered = [record.t_ns for record in trace.of(Event.ENTERED) if record.source == target.worker]
    return any(target.injected_ns < t_ns <= _finished_ns(trace, step) for t_ns in entered)


def _promised_steps(trace: RunTrace, target: Struck, where: str) -> int | None:
    config = trace.config
    if config.nodes < 2:
        return None  # no rank has a second copy to compare with
    if config.job.sharded and trace.holders(target.worker, target.injected_ns) < 2:
        return None
    if where in ("weight", "optimizer") and config.state_hash_steps:
        return config.state_hash_steps
    if where == "received" and config.hash_every == 1:
        return 0 if config.reduction == "exact" or config.job.sharded else 1
    return None


def _target(strike: InjectionRecord) -> Struck:
    assert strike.target is not None, "a fault that took effect has a target"
    return strike.target
