"""Whether each fault struck what was planned: by the journals of all others, never by what its injector says alone."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from chaoskit.faults import Kill, KillNode, NaN
from chaoskit.faults.base import Fault
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event, Verdict

NAME = "{fault} struck what was planned"
#: The harness hears of the first commit by a heartbeat, so it counts from a moment that is later, never earlier.
_CLOCK_S = 0.001


class _Witnesses:
    """What all others tell of the moments at which faults act."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.plans: list[Record] = []
        self._generations: dict[int, list[Record]] = defaultdict(list)  # of the plans
        self.first_commit_ns: int | None = None
        self._hooks: dict[
            tuple[str, str], Record
        ] = {}  # worker that stood there, fault -> the first time
        self._starts: dict[str, list[Record]] = defaultdict(list)  # worker -> by which node
        self._given: dict[str, list[Record]] = defaultdict(list)  # worker -> its contributions
        self._bad: dict[str, list[Record]] = defaultdict(
            list
        )  # worker -> its numbers that were found not finite
        self._finished: set[str] = set()
        self._ends: dict[str, list[Record]] = defaultdict(list)  # worker -> its loss or exit
        for record in records:
            match record.event:
                case Event.PLAN:
                    self.plans.append(record)
                    self._generations[record["generation"]].append(record)
                case Event.COMMIT if self.first_commit_ns is None:
                    self.first_commit_ns = record.t_ns
                case Event.HOOK_STOPPED:
                    self._hooks.setdefault((record.source, record["fault"]), record)
                case Event.WORKER_STARTED:
                    self._starts[record["worker"]].append(record)
                case Event.REDUCE:
                    self._given[record.source].append(record)
                case Event.NONFINITE:
                    self._bad[record["worker"]].append(record)
                case Event.FINISHED:
                    self._finished.add(record.source)
                case Event.WORKER_EXITED | Event.DETECTED:
                    self._ends[record["worker"]].append(record)

    def hook(self, one: InjectionRecord, struck: Struck) -> Record | None:
        """The word of the worker that waited, that it stood where the fault was due."""
        return self._hooks.get((struck.waiting, one.fault_id))

    def starts(self, struck: Struck) -> list[Record]:
        """The word of the nodes that started the worker."""
        return self._starts[struck.worker]

    def ends_before(self, struck: Struck) -> bool:
        """Whether the worker was lost, or had ended, before the fault acted on it."""
        return any(record.t_ns < struck.injected_ns for record in self._ends[struck.worker])

    def reached(self, struck: Struck) -> int:
        """The last step that the worker contributed to; -1 if it contributed to none."""
        return max((record["step"] for record in self._given[struck.worker]), default=-1)

    def contributed_since(self, struck: Struck) -> bool:
        """Whether the worker contributed to a step after the act of the fault was over."""
        return any(record.t_ns > struck.done_ns for record in self._given[struck.worker])

    def first_bad(self, struck: Struck) -> Record | None:
        """The first numbers of the worker that were found not finite after the fault acted on it."""
        return next(
            (record for record in self._bad[struck.worker] if record.t_ns > struck.injected_ns),
            None,
        )

    def finished(self, struck: Struck) -> bool:
        """Whether the worker came to the end of the job."""
        return struck.worker in self._finished

    def memberships(self, one: InjectionRecord, struck: Struck) -> list[Record]:
        """Those that may have been in force: the newest one, and that of the rank that stood at the hook."""
        count = bisect_right(self.plans, struck.injected_ns, key=lambda plan: plan.t_ns)
        hook = self.hook(one, struck)
        stood = self._generations.get(hook["generation"], []) if hook is not None else []
        return [*self.plans[max(0, count - 1) : count], *stood]

    def memberships_of_role(self, hook: Record | None, struck: Struck) -> list[Record]:
        """Return the memberships by which a role may have been resolved: that of the rank at the hook.

        Without a hook these are the two newest, since the harness may not have heard of the newest one.
        """
        if hook is not None:
            return self._generations.get(hook["generation"], [])
        count = bisect_right(self.plans, struck.injected_ns, key=lambda plan: plan.t_ns)
        return [plan for plan in self.plans[max(0, count - 2) : count] if plan["members"]]


def audit(injections: Sequence[InjectionRecord], records: Sequence[Record]) -> list[Check]:
    """Return an error for each fault that struck something else, and unknown for each of which that is not told."""
    checks, witnesses = [], _Witnesses(records)
    for one in injections:
        if one.target is None or one.missed:
            continue
        name = NAME.format(fault=one.fault)
        if wrong := [*_mismatches(one, one.target, witnesses)]:
            checks.append(Check(name=name, verdict=Verdict.ERROR, detail="; ".join(wrong)))
        elif untold := [*_untold(one, one.target, witnesses)]:
            checks.append(Check(name=name, verdict=Verdict.UNKNOWN, detail="; ".join(untold)))
    return checks


def _mismatches(one: InjectionRecord, struck: Struck, witnesses: _Witnesses) -> Iterator[str]:
    fault, plans = one.fault, witnesses.memberships(one, struck)
    yield from _another_rank(one, struck, witnesses)
    if plans and struck.rank not in {_rank_in(plan, struck.worker) for plan in plans}:
        yield f"{struck.worker} did not have rank {struck.rank} then"
    if (hook := witnesses.hook(one, struck)) is not None:
        yield from _elsewhere(one, struck, hook)
    for record in witnesses.starts(struck):
        if (record.source, record["pid"]) != (struck.node, struck.pid):
            yield f"{struck.worker} was process {record['pid']} of {record.source}, not {struck.pid} of {struck.node}"
    if fault.after_s is not None and witnesses.first_commit_ns is not None:
        after_s = (struck.injected_ns - witnesses.first_commit_ns) / 1e9
        if after_s < fault.after_s - _CLOCK_S:
            yield f"it struck {after_s:.3f} s after the first committed step, not {fault.after_s:g} s"
    if one.effective_ns is not None and one.effective_ns < struck.injected_ns:
        yield "its effect was seen before it acted"
    if not one.is_about_its_target:
        yield f"its evidence is not about what it struck: {one.subject or one.observed}"
    if witnesses.ends_before(struck):
        yield f"{struck.worker} was lost before it acted"
    if one.effective_ns is not None and _ends_its_rank(one):
        yield from _lived_on(one, struck, witnesses)
    if isinstance(fault, KillNode) and struck.struck_nodes != {struck.node}:
        yield f"it struck {', '.join(sorted(struck.struck_nodes))}, and rank {struck.rank} was on {struck.node}"
    if one.observed and not _is_about_its_tensor(one):
        yield f"its evidence is of another tensor: {one.observed}"
    if (
        _is_of_one_step(fault)
        and (bad := witnesses.first_bad(struck))
        and bad["step"] != fault.at_step
    ):
        yield f"numbers were bad in step {bad['step']}, not in step {fault.at_step}"


def _another_rank(one: InjectionRecord, struck: Struck, witnesses: _Witnesses) -> Iterator[str]:
    """Yield which rank was struck, if the field of the plan names another one.

    The fault's own methods are not asked: they have chosen what was struck.
    """
    wanted = one.fault.rank
    hook = witnesses.hook(one, struck)
    if one.fault.every_rank:
        return
    if isinstance(wanted, int) and struck.rank != wanted:
        yield f"it struck rank {struck.rank}, not rank {wanted}"
    if wanted == "most_shards":
        heaviest = {_heaviest(plan) for plan in witnesses.memberships_of_role(hook, struck)}
        if heaviest and struck.rank not in heaviest:
            yield f"it struck rank {struck.rank}, and rank {max(heaviest)} had most shards"
    if wanted == "healer" and hook is not None and struck.worker != hook.get("peer", struck.worker):
        yield f"it struck {struck.worker}, and {struck.waiting} was about to take its state from {hook['peer']}"


def _heaviest(plan: Record) -> int:
    """Return the rank with most shards; the lowest of them on a tie."""
    return int(
        max(plan["members"], key=lambda member: (len(member["shards"]), -member["rank"]))["rank"]
    )


def _ends_its_rank(one: InjectionRecord) -> bool:
    """Whether a fault of this kind ends its rank there and then, and no other one."""
    fault = one.fault
    return bool(fault.must_show) and not fault.whole_node and "nonfinite" not in fault.must_show


def _is_killed_before_it_contributes(one: InjectionRecord, struck: Struck) -> bool:
    """Whether a rank that stood at the fault's hook has no way to contribute to the step any more."""
    fault = one.fault
    return (
        isinstance(fault, Kill)
        and fault.signum == Kill.signum
        and bool(struck.waiting)
        and fault.phase != "optimizer"
    )


def _is_about_its_tensor(one: InjectionRecord) -> bool:
    """Whether what was read back names the tensor that a fault was to change; a fault may leave that open."""
    wanted = getattr(one.fault, "parameter", "")
    return (
        not wanted
        or re.search(rf"(?<![\w.]){re.escape(wanted)}(?![\w.])", one.observed) is not None
    )


def _is_of_one_step(fault: Fault) -> bool:
    """Whether a fault spoils numbers of the step in which it is due. A weight stays bad, and may show later."""
    return isinstance(fault, NaN) and fault.where != "weight" and fault.at_step is not None


def _lived_on(one: InjectionRecord, struck: Struck, witnesses: _Witnesses) -> Iterator[str]:
    """What a rank cannot do that was ended where the fault was due, and what no other rank suffers."""
    if witnesses.finished(struck):
        yield f"{struck.worker} came to the end of the job"
    elif (
        one.fault.at_step is not None and (reached := witnesses.reached(struck)) > one.fault.at_step
    ):
        yield f"{struck.worker} went on to step {reached}"
    elif _is_killed_before_it_contributes(one, struck) and witnesses.contributed_since(struck):
        yield f"{struck.worker} went on, and contributed to step {witnesses.reached(struck)}"
    for other in sorted(struck.claims.keys() - {struck.worker}):
        yield f"it struck {other}, too"


def _elsewhere(one: InjectionRecord, struck: Struck, hook: Record) -> Iterator[str]:
    """Where the worker that waited says that it stood, if it is not where the fault was due."""
    fault, place = one.fault, f"{struck.waiting} stood in"
    if fault.at_step is not None and (hook["step"], hook["phase"]) != (fault.at_step, fault.phase):
        yield f"{place} {hook['phase']} of step {hook['step']}, not {fault.moment}"
    if hook["step"] != struck.step:
        yield f"{place} step {hook['step']}, and the harness says {struck.step}"
    if fault.during is not None and hook["phase"] != fault.during:
        yield f"{place} {hook['phase']}, not {fault.moment}"
    if fault.after_s is not None and hook["phase"] != fault.phase:
        yield f"{place} {hook['phase']}, not {fault.moment}"
    if fault.during is not None and hook["generation"] <= fault.recovery:
        yield f"{place} generation {hook['generation']}, not {fault.moment}"
    if hook.t_ns > struck.injected_ns:
        yield "it struck before its rank stood where it was due"


def _untold(one: InjectionRecord, struck: Struck, witnesses: _Witnesses) -> Iterator[str]:
    if one.fault.at_step is not None and witnesses.hook(one, struck) is None:
        yield f"{struck.waiting or struck.worker} does not tell that it stood {one.fault.moment}"
    if not witnesses.starts(struck):
        yield f"no node tells that it started {struck.worker}"
    if not witnesses.memberships(one, struck):
        yield f"no membership tells which rank {struck.worker} had"


def _rank_in(plan: Record, worker: str) -> int | None:
    return next((member["rank"] for member in plan["members"] if member["worker"] == worker), None)
