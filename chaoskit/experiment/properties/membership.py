"""Properties of membership: generations, terms, strikes, budgets and replacements.

-> experiment/properties/__init__.py turns the violations into checks.
coordinator/membership/strikes.py: how the runtime counts strikes and failures.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from chaoskit.experiment.properties.base import SLACK_S, Finding, RunTrace
from chaoskit.experiment.properties.promised import PAUSE_MAX_S, PAUSE_S, STRIKE_WINDOW_S
from chaoskit.vocabulary import SUSPECTED_CAUSES, Event


def convicts(trace: RunTrace) -> Finding:
    """Return each rank that the job's own numbers convicted and that was not given up.

    The state of its process and node does not matter. The result is None if no rank was convicted.
    """
    convicted = {
        record["worker"] for record in trace.of(Event.CORRUPT) if record["verdict"] == "rank"
    }
    for record in trace.of(Event.ATTRIBUTED):
        if record["verdict"] == "rank":
            workers_by_rank = {
                rank: worker for worker, rank in trace.members.get(record["generation"], {}).items()
            }
            convicted |= {
                workers_by_rank[rank] for rank in record["ranks"] if rank in workers_by_rank
            }
    if not convicted:
        return None
    return [
        f"{worker} was convicted, but not given up"
        for worker in sorted(convicted)
        if worker not in trace.lost_ns
    ]


def generations(trace: RunTrace) -> Finding:
    """Return each generation that is not higher than the one before, over all coordinators.

    The result is None without a plan.
    """
    numbers = [plan["generation"] for plan in trace.of(Event.PLAN)]
    if not numbers:
        return None
    return [
        f"generation {later} came after {earlier}"
        for earlier, later in pairwise(numbers)
        if later <= earlier
    ]


def terms(trace: RunTrace) -> Finding:
    """Return each coordinator without a higher term, or without the generations before it.

    Each loss of the coordinator's log is a violation, too, unless its pod was taken away. The
    result is None if the run had one coordinator, and its log was not lost.
    """
    resumed_records, lost_log_records = trace.of(Event.RESUMED), trace.of(Event.RECORD_LOST)
    if not resumed_records and not lost_log_records:
        return None
    term_numbers = [1, *(record["term"] for record in resumed_records)]
    problems = [
        f"term {later} came after {earlier}"
        for earlier, later in pairwise(term_numbers)
        if later <= earlier
    ]
    for record in resumed_records:
        earlier_generations = [
            plan["generation"] for plan in trace.of(Event.PLAN) if plan.t_ns < record.t_ns
        ]
        if record["generation"] < max(earlier_generations, default=0):
            problems.append(
                f"term {record['term']} began with generation {record['generation']} of {max(earlier_generations)}"
            )
    if any(record["role"] == "coordinator" for record in trace.of(Event.POD_TAKEN)):
        return problems  # the part of the record that had not been copied was lost with the pod
    return problems + [
        f"the coordinator's log was lost: {record['detail']}" for record in lost_log_records
    ]


def strikes(trace: RunTrace) -> Finding:
    """Return each node with too many strikes that was not set aside, or got a worker afterwards.

    A node that was lost begins anew. A worker may be started there for another 10 s, and at any
    time if no other node is left. The result is None if no node had so many strikes, and none was
    set aside.
    """
    limit, window_ns = trace.config.strikes_max, STRIKE_WINDOW_S * 1e9
    strike_times: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in trace.of(Event.DETECTED):
        # the loss of a node is one strike, however many workers were on it
        if record["cause"] != "node lost" and record.t_ns < trace.end_ns:
            strike_times[
                _node_lifetime(trace, record["worker"].rpartition(".")[0], record.t_ns)
            ].append(record.t_ns)
    set_aside_ns = {
        _node_lifetime(trace, record["node"], record.t_ns): record.t_ns
        for record in trace.of(Event.SET_ASIDE)
    }
    due_lifetimes = [
        lifetime
        for lifetime, times in strike_times.items()
        if limit
        and any(
            last_ns - first_ns <= window_ns
            for first_ns, last_ns in zip(times, times[limit - 1 :], strict=False)
        )
    ]
    if not due_lifetimes and not set_aside_ns:
        return None
    problems = [
        f"{lifetime[0]} has {limit} strikes, and is not set aside"
        for lifetime in due_lifetimes
        if lifetime not in set_aside_ns
    ]
    lost_nodes = {
        record["worker"].rpartition(".")[0]
        for record in trace.of(Event.DETECTED)
        if record["cause"] == "node lost"
    }
    other_nodes = (
        {start_record.source for start_record in trace.of(Event.WORKER_STARTED)}
        - {node for node, _ in set_aside_ns}
        - lost_nodes
    )
    for record in trace.of(Event.WORKER_STARTED):
        after_ns = set_aside_ns.get(_node_lifetime(trace, record.source, record.t_ns))
        if after_ns is not None and record.t_ns > after_ns + SLACK_S * 1e9 and other_nodes:
            problems.append(
                f"{record['worker']} was started on {record.source}, which is set aside"
            )
    return problems


def _node_lifetime(trace: RunTrace, node: str, t_ns: int) -> tuple[str, int]:
    """Return the name of a node and how often the node was lost before a time.

    A lost node may be replaced under the same name.
    """
    return node, sum(
        record["node"] == node and record.t_ns < t_ns for record in trace.of(Event.NODE_LOST)
    )


def budget(trace: RunTrace) -> Finding:
    """Return a violation if a job ended well although it lost more workers than it may.

    Workers count that were ready, and were not given up on suspicion. The result is None if none of
    them was lost, or the end of the job was not recorded.
    """
    ready = {record.source for record in trace.of(Event.READY)}
    suspected = {
        record["worker"]
        for record in trace.of(Event.DETECTED)
        if record["cause"] in SUSPECTED_CAUSES
    }
    lost_ns = {
        worker: t_ns for worker, t_ns in trace.lost_ns.items() if worker in ready - suspected
    }
    lost_workers = [worker for worker, t_ns in lost_ns.items() if t_ns < trace.end_ns]
    end_record = trace.first(Event.JOB_ENDED)
    if end_record is None or not lost_workers:
        return None
    limit = trace.config.max_failures
    return (
        [f"{len(lost_workers)} workers were lost, max_failures={limit}"]
        if end_record["ok"] and len(lost_workers) > limit
        else []
    )


def rehearsed(trace: RunTrace) -> Finding:
    """Return each worker that got a rank before it had shown that it can train a step.

    A worker shows that by its record ``ready``. The property applies to every run.
    """
    ready_ns = {record.source: record.t_ns for record in trace.of(Event.READY)}
    return [
        f"{member['worker']} got rank {member['rank']} in generation {plan['generation']} before it was ready"
        for plan in trace.of(Event.PLAN)
        for member in plan["members"]
        if ready_ns.get(member["worker"], plan.t_ns + 1) > plan.t_ns
    ]


def second_replacement(trace: RunTrace) -> Finding:
    """Return each failed replacement after which no other worker was started in time.

    The limit is the pause for the failures in a row so far. The result is None if no replacement
    failed before it had a rank.
    """
    ranked = {worker for members in trace.members.values() for worker in members}
    failed_replacements = [
        record for record in trace.of(Event.DETECTED) if record["worker"] not in ranked
    ]
    started_ns = [record.t_ns for record in trace.of(Event.WORKER_STARTED)]
    if not failed_replacements:
        return None
    problems, ready_ns = [], [record.t_ns for record in trace.of(Event.READY)]
    for position, record in enumerate(failed_replacements):
        last_ready_ns = max((t_ns for t_ns in ready_ns if t_ns < record.t_ns), default=0)
        # failures in a row before this one
        failures_before = sum(
            earlier.t_ns > last_ready_ns for earlier in failed_replacements[:position]
        )
        pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0**failures_before)
        due_ns = record.t_ns + int((pause_s + SLACK_S) * 1e9)
        if due_ns < trace.end_ns and not any(record.t_ns < t_ns <= due_ns for t_ns in started_ns):
            problems.append(
                f"no worker was started within {pause_s + SLACK_S:g} s after {record['worker']} had failed"
            )
    return problems


def fingerprints(trace: RunTrace) -> Finding:
    """Return a violation if ranks had different code, versions or numeric switches.

    The result is None if fewer than two workers were ready.
    """
    fingerprint_by_worker = {
        record.source: record.get("fingerprint", "") for record in trace.of(Event.READY)
    }
    ranked = {worker for members in trace.members.values() for worker in members}
    different = {
        fingerprint_by_worker[worker] for worker in ranked if worker in fingerprint_by_worker
    }
    if len(fingerprint_by_worker) < 2:
        return None
    return [f"ranks had {len(different)} different fingerprints"] if len(different) > 1 else []
