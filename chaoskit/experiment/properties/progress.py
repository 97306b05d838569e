"""Properties of time: detections, waits and recoveries within a bound.

-> experiment/properties/__init__.py turns the violations into checks.
experiment/properties/promised.py and base.py (hang_limit_s): the bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict

from chaoskit.experiment.properties import promised
from chaoskit.experiment.properties.base import SLACK_S, Finding, RunTrace
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.vocabulary import HUNG, SLOW, Event

# before so many steps no durations are known, and only the start-up limit detects a hang
_SETTLED_STEPS = 5
_REGROUP_S = 1.0  # seconds for each rank; measured: a few milliseconds
#: Kinds of faults that end the coordinator.
_COORDINATOR_ENDS = ("KillCoordinator", "DeleteCoordinatorPod")


def abort(trace: RunTrace) -> Finding:
    """Return each survivor of a loss that joined no new group within a quarter of the timeout.

    The timeout is ``collective_timeout_s``. The result is None if no membership with survivors was interrupted.
    """
    limit_s = trace.config.collective_timeout_s / 4
    problems, applies = [], False
    # worker -> records of the groups that it joined
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in trace.of(Event.REGROUPED):
        groups[record.source].append(record)
    for plan in trace.of(Event.PLAN):
        generation = plan["generation"]
        survivors = trace.members.get(generation - 1, {}).keys() & trace.members[generation].keys()
        if not plan["abort"] or generation == 1 or not survivors:
            continue
        applies = True
        due_ns = plan.t_ns + int(limit_s * 1e9)
        if due_ns > trace.end_ns:
            continue
        for worker in survivors:
            was_lost = trace.lost_ns.get(worker, math.inf) <= due_ns
            has_regrouped = any(
                regrouped["generation"] >= generation and regrouped.t_ns <= due_ns
                for regrouped in reversed(groups[worker])
            )
            if not was_lost and not has_regrouped:
                problems.append(f"{worker} was not in generation {generation} after {limit_s:g} s")
    return problems if applies else None


def lease(trace: RunTrace) -> Finding:
    """Return each rank without progress that was not given up within a few step times.

    The state of its process does not matter. The result is None if no fault made a rank hang.
    """
    hung_targets = [
        target
        for strike, target in trace.confirmed("Hang", "Deadlock")
        if getattr(strike.fault, "how", "") != "skip"
    ]
    if not hung_targets:
        return None
    problems = []
    for target in hung_targets:
        # time without a CPU does not count for the phase
        limit_s = (
            trace.hang_limit_s(target.injected_ns) + promised.FOLLOW_S + SLACK_S + target.starved_s
        )
        if trace.steps_before(target.injected_ns) < _SETTLED_STEPS:
            limit_s += trace.config.startup_s
        lost_ns = trace.lost_ns.get(target.worker)
        if (trace.end_ns if lost_ns is None else lost_ns) - target.injected_ns > limit_s * 1e9:
            problems.append(
                f"{target.worker} made no progress, but was not given up within {limit_s:.1f} s"
            )
    return problems


def slow_ranks(trace: RunTrace) -> Finding:
    """Return each rank that was slow within the limit and was given up for it.

    A rank is within the limit if a fault delays it by less than half of ``hang_floor_ms``. The
    result is None if no fault slowed a rank like this.
    """
    floor_ms = trace.config.hang_floor_ms
    slow_strikes = [
        (strike, target)
        for strike, target in trace.confirmed("Straggle", "DataStall")
        if max(getattr(strike.fault, "delay_ms", 0.0), getattr(strike.fault, "stall_ms", 0.0))
        < floor_ms / 2
    ]
    return _not_given_up(trace, slow_strikes, (HUNG,) if trace.config.slow_limit else (HUNG, SLOW))


def wall_clock(trace: RunTrace) -> Finding:
    """Return each rank that was given up after a jump of its wall clock.

    The result is None if no clock jumped.
    """
    return _not_given_up(trace, trace.confirmed("ClockJump"), ())


def _not_given_up(
    trace: RunTrace, strikes: list[tuple[InjectionRecord, Struck]], causes: tuple[str, ...]
) -> Finding:
    """Return each rank that was given up although only one of ``strikes`` had struck it.

    The result is None without strikes.

    Args:
        trace: the journals of the run.
        strikes: the faults that must have no consequence, each with its target.
        causes: causes of losses that count; empty for all.
    """
    if not strikes:
        return None
    problems = []
    for strike, target in strikes:
        worker = target.worker
        loss_records = [
            record
            for record in trace.of(Event.DETECTED)
            if record["worker"] == worker
            and (not causes or record["cause"] in causes)
            and target.injected_ns < record.t_ns < trace.end_ns
        ]
        if (
            loss_records
            and trace.struck_by(worker) == [strike.fault.kind]
            and not _on_struck_node(trace, worker)
        ):
            problems.append(
                f"{worker} was struck by {strike.fault} only, but given up: {loss_records[0]['cause']}"
            )
    return problems


def _on_struck_node(trace: RunTrace, worker: str) -> bool:
    """Return whether the node of a worker was struck as a whole, or its pod was taken."""
    node_injections = [
        injection
        for injection in trace.run.injections
        if injection.fault.whole_node and not injection.missed
    ]
    struck_nodes = {
        node
        for injection in node_injections
        if injection.target is not None
        for node in injection.target.struck_nodes
    }
    struck_nodes.update(record["node"] for record in trace.of(Event.POD_TAKEN))
    return worker.rpartition(".")[0] in struck_nodes


def settles(trace: RunTrace) -> Finding:
    """Return each membership that did not settle within a time linear in its ranks.

    Only memberships that interrupted a step count. The time ends early when the membership is
    replaced. The result is None without a plan.
    """
    plans = trace.of(Event.PLAN)
    problems = []
    for position, plan in enumerate(plans):
        over_ns = plans[position + 1].t_ns if position + 1 < len(plans) else trace.end_ns
        settled_ns = min(trace.settled_ns.get(plan["generation"], over_ns), over_ns)
        limit_s = SLACK_S + _REGROUP_S * len(plan["members"])
        if plan["abort"] and settled_ns - plan.t_ns > limit_s * 1e9:
            problems.append(f"generation {plan['generation']} did not settle within {limit_s:g} s")
    return problems if plans else None


def coordinator_returns(trace: RunTrace) -> Finding:
    """Return each fault after which no coordinator took over before agents gave up waiting.

    The result is None if no fault ended the coordinator.
    """
    coordinator_faults = trace.confirmed(*_COORDINATOR_ENDS)
    if not coordinator_faults:
        return None
    problems = []
    for _, target in coordinator_faults:
        acted_ns = target.injected_ns  # the earliest time of the act
        due_ns = acted_ns + int(trace.config.coordinator_outage_s * 1e9)
        resumed_record = trace.first(Event.RESUMED, acted_ns)
        if (resumed_record.t_ns if resumed_record else trace.end_ns) > due_ns:
            problems.append(
                f"no coordinator took over within {trace.config.coordinator_outage_s:g} s"
            )
        if resumed_record is None and trace.run.end is None:
            problems.append("no coordinator took over, and the run did not end")
    return problems


def blind(trace: RunTrace) -> Finding:
    """Return each loss of the coordinator after which ranks did not go on with their steps.

    The result is None if no fault ended the coordinator, or the membership changed.
    """
    coordinator_faults = trace.confirmed(*_COORDINATOR_ENDS)
    if not coordinator_faults or len(trace.members) > 1:
        return None  # after the loss of a rank, the world must wait for a coordinator
    problems = []
    limit_ns = int((trace.config.hang_steps * trace.usual_step_s + SLACK_S) * 1e9)
    times_ns = sorted(record.t_ns for record in trace.of(Event.COMMIT, Event.FINISHED))
    for strike, target in coordinator_faults:
        acted_ns = target.injected_ns
        after_ns = next((t_ns for t_ns in times_ns if t_ns > acted_ns), trace.end_ns)
        if after_ns - acted_ns > limit_ns:
            problems.append(
                f"no step was committed for {(after_ns - acted_ns) / 1e9:.1f} s after {strike.fault}"
            )
    return problems


def recovery_limit_s(trace: RunTrace) -> float:
    """Return the sum of the limits that a recovery may reach, in seconds."""
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
    """Return a violation if k recoveries together took more than k times the bound.

    The result is None without a recovery.
    """
    if not trace.recoveries:
        return None
    spans = sorted(
        (recovery.injected_s, recovery.injected_s + recovery.seconds)
        for recovery in trace.recoveries
    )
    total_s, until_s = 0.0, 0.0
    for start_s, end_s in spans:
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    has_early_fault = any(
        recovery.target is not None and recovery.target.step < _SETTLED_STEPS
        for recovery in trace.run.injections
    )
    limit_s = len(spans) * (recovery_limit_s(trace) + trace.config.startup_s * has_early_fault)
    return (
        [f"{len(spans)} losses cost {total_s:.1f} s, limit {limit_s:.1f} s"]
        if total_s > limit_s
        else []
    )


def corruption(trace: RunTrace) -> Finding:
    """Return each flipped bit of state or received data that was not found in the promised steps.

    The result is None if no flip had to be found before the run ended.
    """
    problems, applies = [], False
    last_step = max(trace.history.steps, default=-1)
    for strike, target in trace.confirmed("BitFlip"):
        promised_steps = _promised_steps(trace, target, str(getattr(strike.fault, "where", "")))
        if promised_steps is None or target.step + promised_steps > last_step:
            continue
        applies = True
        if trace.lost_ns.get(target.worker, math.inf) <= _finished_ns(
            trace, target.step + promised_steps
        ):
            continue  # the rank was lost for another reason before the time was over
        naming_records = [
            record
            for record in trace.of(Event.CORRUPT)
            if target.worker in (record["worker"], *record["sources"])
            and target.step <= record["step"] <= target.step + promised_steps
        ]
        if not naming_records and not _was_restored(trace, target, target.step + promised_steps):
            problems.append(f"{strike.fault} was not found by step {target.step + promised_steps}")
    return problems if applies else None


def _finished_ns(trace: RunTrace, step: int) -> int:
    """Return when the last rank had finished ``step``, in ns; the end of the job if none did.

    The generation with the kept result counts.
    """
    finished_step = trace.history.steps.get(step)
    return max(record.t_ns for record in finished_step.finishers) if finished_step else trace.end_ns


def _was_restored(trace: RunTrace, target: Struck, step: int) -> bool:
    """Return whether the rank restored its piece before ``step`` was over.

    The copy may not have had the flip.
    """
    entered = [record.t_ns for record in trace.of(Event.ENTERED) if record.source == target.worker]
    return any(target.injected_ns < t_ns <= _finished_ns(trace, step) for t_ns in entered)


def _promised_steps(trace: RunTrace, target: Struck, where: str) -> int | None:
    """Return the number of steps within which a flip must be found; None if nothing promises it."""
    config = trace.config
    if config.nodes < 2:
        return None  # there is no second rank to compare with
    if config.job.sharded and trace.holders(target.worker, target.injected_ns) < 2:
        return None
    if where in ("weight", "optimizer") and config.state_hash_steps:
        return config.state_hash_steps
    if where == "received" and config.hash_every == 1:
        return 0 if config.reduction == "exact" or config.job.sharded else 1
    return None
