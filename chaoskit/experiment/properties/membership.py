"""Properties of membership: generations, terms, strikes, budgets, replacements."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from chaoskit.experiment.properties.base import SLACK_S, Finding, RunTrace
from chaoskit.experiment.properties.promised import PAUSE_MAX_S, PAUSE_S, STRIKE_WINDOW_S
from chaoskit.vocabulary import SUSPECTED_CAUSES, Event


def convicts(trace: RunTrace) -> Finding:
    """A rank that the job's own numbers convict is given up, however well its process and its node look."""
    guilty = {record["worker"] for record in trace.of(Event.CORRUPT) if record["verdict"] == "rank"}
    for record in trace.of(Event.ATTRIBUTED):
        if record["verdict"] == "rank":
            ranks = {
                rank: worker for worker, rank in trace.members.get(record["generation"], {}).items()
            }
            guilty |= {ranks[rank] for rank in record["ranks"] if rank in ranks}
    if not guilty:
        return None
    return [
        f"{worker} was found guilty, and goes on"
        for worker in sorted(guilty)
        if worker not in trace.lost_ns
    ]


def generations(trace: RunTrace) -> Finding:
    """Generations strictly increase, over all coordinators."""
    numbers = [plan["generation"] for plan in trace.of(Event.PLAN)]
    if not numbers:
        return None
    return [
        f"generation {later} came after {earlier}"
        for earlier, later in pairwise(numbers)
        if later <= earlier
    ]


def terms(trace: RunTrace) -> Finding:
    """Each coordinator has a higher term than the one before it, and knows of every generation of that."""
    resumed, lost = trace.of(Event.RESUMED), trace.of(Event.RECORD_LOST)
    if not resumed and not lost:
        return None
    numbers = [1, *(record["term"] for record in resumed)]
    found = [
        f"term {later} came after {earlier}"
        for earlier, later in pairwise(numbers)
        if later <= earlier
    ]
    for record in resumed:
        known = [plan["generation"] for plan in trace.of(Event.PLAN) if plan.t_ns < record.t_ns]
        if record["generation"] < max(known, default=0):
            found.append(
                f"term {record['term']} began with generation {record['generation']} of {max(known)}"
            )
    if any(record["role"] == "coordinator" for record in trace.of(Event.POD_TAKEN)):
        return found  # its pod was taken away, with what had not been copied of the record
    return found + [f"the record was lost: {record['detail']}" for record in lost]


def strikes(trace: RunTrace) -> Finding:
    """A node with too many strikes within the window is set aside, and started no worker on until it is lost."""
    limit, window_ns = trace.config.strikes_max, STRIKE_WINDOW_S * 1e9
    struck: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in trace.of(Event.DETECTED):
        # the loss of a node is one strike, however many workers were on it
        if record["cause"] != "node lost" and record.t_ns < trace.end_ns:
            struck[_life(trace, record["worker"].rpartition(".")[0], record.t_ns)].append(
                record.t_ns
            )
    aside = {
        _life(trace, record["node"], record.t_ns): record.t_ns
        for record in trace.of(Event.SET_ASIDE)
    }
    due = [
        life
        for life, times in struck.items()
        if limit
        and any(
            last - first <= window_ns
            for first, last in zip(times, times[limit - 1 :], strict=False)
        )
    ]
    if not due and not aside:
        return None
    found = [
        f"{life[0]} has {limit} strikes, and is not set aside" for life in due if life not in aside
    ]
    lost = {
        record["worker"].rpartition(".")[0]
        for record in trace.of(Event.DETECTED)
        if record["cause"] == "node lost"
    }
    others = (
        {started.source for started in trace.of(Event.WORKER_STARTED)}
        - {node for node, _ in aside}
        - lost
    )
    for record in trace.of(Event.WORKER_STARTED):
        after_ns = aside.get(_life(trace, record.source, record.t_ns))
        if after_ns is not None and record.t_ns > after_ns + SLACK_S * 1e9 and others:
            found.append(f"{record['worker']} was started on {record.source}, which is set aside")
    return found


def _life(trace: RunTrace, node: str, t_ns: int) -> tuple[str, int]:
    """What bears the name ``node`` at a time: the name, and how often the node was lost before. It may be replaced."""
    return node, sum(
        record["node"] == node and record.t_ns < t_ns for record in trace.of(Event.NODE_LOST)
    )


def budget(trace: RunTrace) -> Finding:
    """A job that has lost more workers than it may is not called a success."""
    ready = {record.source for record in trace.of(Event.READY)}
    suspected = {
        record["worker"]
        for record in trace.of(Event.DETECTED)
        if record["cause"] in SUSPECTED_CAUSES
    }
    losses = {worker: t_ns for worker, t_ns in trace.lost_ns.items() if worker in ready - suspected}
    lost = [worker for worker, t_ns in losses.items() if t_ns < trace.end_ns]
    ended = trace.first(Event.JOB_ENDED)
    if ended is None or not lost:
        return None
    limit = trace.config.max_failures
    return (
        [f"{len(lost)} workers were lost, max_failures={limit}"]
        if ended["ok"] and len(lost) > limit
        else []
    )


def rehearsed(trace: RunTrace) -> Finding:
    """A worker gets a rank only after it has shown that it can train a step."""
    ready_ns = {record.source: record.t_ns for record in trace.of(Event.READY)}
    return [
        f"{member['worker']} got rank {member['rank']} in generation {plan['generation']} before it was ready"
        for plan in trace.of(Event.PLAN)
        for member in plan["members"]
        if ready_ns.get(member["worker"], plan.t_ns + 1) > plan.t_ns
    ]


def second_replacement(trace: RunTrace) -> Finding:
    """When a replacement fails, the next one is started within the pause that the failures in a row ask for."""
    ranked = {worker for members in trace.members.values() for worker in members}
    failed = [record for record in trace.of(Event.DETECTED) if record["worker"] not in ranked]
    started = [record.t_ns for record in trace.of(Event.WORKER_STARTED)]
    if not failed:
        return None
    found, ready_ns = [], [record.t_ns for record in trace.of(Event.READY)]
    for place, record in enumerate(failed):
        last_ready_ns = max((t_ns for t_ns in ready_ns if t_ns < record.t_ns), default=0)
        number = sum(
            one.t_ns > last_ready_ns for one in failed[:place]
        )  # of those in a row before it
        pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0**number)
        due_ns = record.t_ns + int((pause_s + SLACK_S) * 1e9)
        if due_ns < trace.end_ns and not any(record.t_ns < t_ns <= due_ns for t_ns in started):
            found.append(
                f"no worker was started within {pause_s + SLACK_S:g} s after {record['worker']} had failed"
            )
    return found


def fingerprints(trace: RunTrace) -> Finding:
    """All workers that ever had a rank compute with the same code, versions and numeric switches."""
    marks = {record.source: record.get("fingerprint", "") for record in trace.of(Event.READY)}
    ranked = {worker for members in trace.members.values() for worker in members}
    different = {marks[worker] for worker in ranked if worker in marks}
    if len(marks) < 2:
        return None
    return [f"ranks had {len(different)} different fingerprints"] if len(different) > 1 else []
