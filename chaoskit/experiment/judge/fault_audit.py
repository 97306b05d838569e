"""Audit of the faults of a job: each must have struck its planned target, by records of other
processes.

What the injector reports about itself proves nothing.

-> runlog/fault_verdict.py (fault_check): a fault that did not act, or has no evidence; faults that
were missed are not audited here. runlog/injected.py: the strike as recorded by the injector.
experiment/judge/command_audit.py: the same for a command.
"""

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
#: The harness counts from the heartbeat that shows the first commit, which is later, never earlier.
_CLOCK_S = 0.001


class _Witnesses:
    """Records of other processes about the moments at which faults act.

    Attributes:
        plans: the records of all plans, by time.
        first_commit_ns: the time of the first committed step, or None.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.plans: list[Record] = []
        self._generations: dict[int, list[Record]] = defaultdict(list)  # generation -> its plans
        self.first_commit_ns: int | None = None
        # (worker at the hook, fault) -> its first record
        self._hooks: dict[tuple[str, str], Record] = {}
        # worker -> records of its starts, by its node
        self._starts: dict[str, list[Record]] = defaultdict(list)
        # worker -> its contributions
        self._contributions: dict[str, list[Record]] = defaultdict(list)
        # worker -> records of its non-finite numbers
        self._nonfinite: dict[str, list[Record]] = defaultdict(list)
        self._finished_workers: set[str] = set()
        # worker -> records of its loss and exit
        self._ends: dict[str, list[Record]] = defaultdict(list)
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
                    self._contributions[record.source].append(record)
                case Event.NONFINITE:
                    self._nonfinite[record["worker"]].append(record)
                case Event.FINISHED:
                    self._finished_workers.add(record.source)
                case Event.WORKER_EXITED | Event.DETECTED:
                    self._ends[record["worker"]].append(record)

    def hook(self, injection: InjectionRecord, target: Struck) -> Record | None:
        """Return the record of the worker that waited at the hook of the fault, or None."""
        return self._hooks.get((target.waiting, injection.fault_id))

    def starts(self, target: Struck) -> list[Record]:
        """Return the records of the starts of the target's worker, as its nodes wrote them."""
        return self._starts[target.worker]

    def ends_before(self, target: Struck) -> bool:
        """Return whether the worker was lost, or had ended, before the fault acted on it."""
        return any(record.t_ns < target.injected_ns for record in self._ends[target.worker])

    def last_contribution(self, target: Struck) -> int:
        """Return the last step that the worker contributed to; -1 if there is none."""
        return max((record["step"] for record in self._contributions[target.worker]), default=-1)

    def contributed_since(self, target: Struck) -> bool:
        """Return whether the worker contributed to a step after the act of the fault was over."""
        return any(record.t_ns > target.done_ns for record in self._contributions[target.worker])

    def first_bad(self, target: Struck) -> Record | None:
        """Return the worker's first record of non-finite numbers after the fault's act."""
        return next(
            (
                record
                for record in self._nonfinite[target.worker]
                if record.t_ns > target.injected_ns
            ),
            None,
        )

    def finished(self, target: Struck) -> bool:
        """Return whether the worker reached the end of the job."""
        return target.worker in self._finished_workers

    def memberships(self, injection: InjectionRecord, target: Struck) -> list[Record]:
        """Return the plans that may have been in force: the newest, and that of the hook.

        The list is empty if no plan was recorded before the strike.
        """
        plan_count = bisect_right(self.plans, target.injected_ns, key=lambda plan: plan.t_ns)
        hook = self.hook(injection, target)
        hook_plans = self._generations.get(hook["generation"], []) if hook is not None else []
        return [*self.plans[max(0, plan_count - 1) : plan_count], *hook_plans]

    def memberships_of_role(self, hook: Record | None, target: Struck) -> list[Record]:
        """Return the plans by which a role may have been resolved.

        They are those of the generation in which the worker waited at the hook. Without a hook
        they are the two newest before the strike, as far as they have members. The harness may not
        have received the newest one.
        """
        if hook is not None:
            return self._generations.get(hook["generation"], [])
        plan_count = bisect_right(self.plans, target.injected_ns, key=lambda plan: plan.t_ns)
        return [plan for plan in self.plans[max(0, plan_count - 2) : plan_count] if plan["members"]]


def audit(injections: Sequence[InjectionRecord], records: Sequence[Record]) -> list[Check]:
    """Return a check for each fault that struck something else than planned; none if all agree.

    A difference gives the verdict error, and missing records give unknown. Faults that did not act,
    or acted too late, are left out.
    """
    checks, witnesses = [], _Witnesses(records)
    for injection in injections:
        if injection.target is None or injection.missed:
            continue
        name = NAME.format(fault=injection.fault)
        if mismatches := [*_mismatches(injection, injection.target, witnesses)]:
            checks.append(Check(name=name, verdict=Verdict.ERROR, detail="; ".join(mismatches)))
        elif missing_records := [*_missing(injection, injection.target, witnesses)]:
            checks.append(
                Check(name=name, verdict=Verdict.UNKNOWN, detail="; ".join(missing_records))
            )
    return checks


def _mismatches(injection: InjectionRecord, target: Struck, witnesses: _Witnesses) -> Iterator[str]:
    """Yield, in words, each contradiction between a fault's plan and the records of its strike."""
    fault, plans = injection.fault, witnesses.memberships(injection, target)
    yield from _rank_mismatches(injection, target, witnesses)
    if plans and target.rank not in {_rank_of(plan, target.worker) for plan in plans}:
        yield f"{target.worker} did not have rank {target.rank} then"
    if (hook := witnesses.hook(injection, target)) is not None:
        yield from _hook_mismatches(injection, target, hook)
    for record in witnesses.starts(target):
        if (record.source, record["pid"]) != (target.node, target.pid):
            yield f"{target.worker} was process {record['pid']} of {record.source}, not {target.pid} of {target.node}"
    if fault.after_s is not None and witnesses.first_commit_ns is not None:
        after_s = (target.injected_ns - witnesses.first_commit_ns) / 1e9
        if after_s < fault.after_s - _CLOCK_S:
            yield f"it struck {after_s:.3f} s after the first committed step, not {fault.after_s:g} s"
    if injection.effective_ns is not None and injection.effective_ns < target.injected_ns:
        yield "its effect was seen before it acted"
    if not injection.is_about_its_target:
        yield f"its evidence is not about what it struck: {injection.subject or injection.observed}"
    if witnesses.ends_before(target):
        yield f"{target.worker} was lost before it acted"
    if injection.effective_ns is not None and _ends_its_rank(injection):
        yield from _survival_mismatches(injection, target, witnesses)
    if isinstance(fault, KillNode) and target.struck_nodes != {target.node}:
        yield f"it struck {', '.join(sorted(target.struck_nodes))}, and rank {target.rank} was on {target.node}"
    if injection.observed and not _is_about_its_tensor(injection):
        yield f"its evidence is of another tensor: {injection.observed}"
    if (
        _is_of_one_step(fault)
        and (first_nonfinite := witnesses.first_bad(target))
        and first_nonfinite["step"] != fault.at_step
    ):
        yield f"numbers were bad in step {first_nonfinite['step']}, not in step {fault.at_step}"


def _rank_mismatches(
    injection: InjectionRecord, target: Struck, witnesses: _Witnesses
) -> Iterator[str]:
    """Yield, in words, a difference between the rank that was struck and the planned one.

    The fault's own methods are not asked, since they chose the target.
    """
    planned_rank = injection.fault.rank
    hook = witnesses.hook(injection, target)
    if injection.fault.every_rank:
        return
    if isinstance(planned_rank, int) and target.rank != planned_rank:
        yield f"it struck rank {target.rank}, not rank {planned_rank}"
    if planned_rank == "most_shards":
        heaviest = {_heaviest(plan) for plan in witnesses.memberships_of_role(hook, target)}
        if heaviest and target.rank not in heaviest:
            yield f"it struck rank {target.rank}, and rank {max(heaviest)} had most shards"
    if (
        planned_rank == "healer"
        and hook is not None
        and target.worker != hook.get("peer", target.worker)
    ):
        yield f"it struck {target.worker}, and {target.waiting} was about to take its state from {hook['peer']}"


def _heaviest(plan: Record) -> int:
    """Return the rank with most shards; the lowest of them on a tie."""
    return int(
        max(plan["members"], key=lambda member: (len(member["shards"]), -member["rank"]))["rank"]
    )


def _ends_its_rank(injection: InjectionRecord) -> bool:
    """Return whether a fault of this kind ends its rank, and no other rank."""
    fault = injection.fault
    return bool(fault.must_show) and not fault.whole_node and "nonfinite" not in fault.must_show


def _is_killed_before_it_contributes(injection: InjectionRecord, target: Struck) -> bool:
    """Return whether the rank at the hook is killed before it can contribute to the step."""
    fault = injection.fault
    return (
        isinstance(fault, Kill)
        and fault.signum == Kill.signum
        and bool(target.waiting)
        and fault.phase != "optimizer"
    )


def _is_about_its_tensor(injection: InjectionRecord) -> bool:
    """Return whether the evidence names the tensor that the fault had to change.

    It is True for a fault that names no tensor.
    """
    parameter = getattr(injection.fault, "parameter", "")
    return (
        not parameter
        or re.search(rf"(?<![\w.]){re.escape(parameter)}(?![\w.])", injection.observed) is not None
    )


def _is_of_one_step(fault: Fault) -> bool:
    """Return whether a fault spoils numbers of its own step only.

    A bad weight stays, and may show later.
    """
    return isinstance(fault, NaN) and fault.where != "weight" and fault.at_step is not None


def _survival_mismatches(
    injection: InjectionRecord, target: Struck, witnesses: _Witnesses
) -> Iterator[str]:
    """Yield, in words, each sign that the rank lived on, and each other worker that was struck."""
    if witnesses.finished(target):
        yield f"{target.worker} reached the end of the job"
    elif (
        injection.fault.at_step is not None
        and (last_step := witnesses.last_contribution(target)) > injection.fault.at_step
    ):
        yield f"{target.worker} went on to step {last_step}"
    elif _is_killed_before_it_contributes(injection, target) and witnesses.contributed_since(
        target
    ):
        yield f"{target.worker} went on, and contributed to step {witnesses.last_contribution(target)}"
    for other_worker in sorted(target.claims.keys() - {target.worker}):
        yield f"it struck {other_worker}, too"


def _hook_mismatches(injection: InjectionRecord, target: Struck, hook: Record) -> Iterator[str]:
    """Yield, in words, each difference between the hook where a worker waited and the plan."""
    fault, waited_in = injection.fault, f"{target.waiting} waited in"
    if fault.at_step is not None and (hook["step"], hook["phase"]) != (fault.at_step, fault.phase):
        yield f"{waited_in} {hook['phase']} of step {hook['step']}, not {fault.moment}"
    if hook["step"] != target.step:
        yield f"{waited_in} step {hook['step']}, but the harness recorded {target.step}"
    if fault.during is not None and hook["phase"] != fault.during:
        yield f"{waited_in} {hook['phase']}, not {fault.moment}"
    if fault.after_s is not None and hook["phase"] != fault.phase:
        yield f"{waited_in} {hook['phase']}, not {fault.moment}"
    if fault.during is not None and hook["generation"] <= fault.recovery:
        yield f"{waited_in} generation {hook['generation']}, not {fault.moment}"
    if hook.t_ns > target.injected_ns:
        yield "it struck before its rank had reached the planned hook"


def _missing(injection: InjectionRecord, target: Struck, witnesses: _Witnesses) -> Iterator[str]:
    """Yield, in words, each record that is missing to confirm the target of a fault."""
    if injection.fault.at_step is not None and witnesses.hook(injection, target) is None:
        yield f"{target.waiting or target.worker} did not record that it waited {injection.fault.moment}"
    if not witnesses.starts(target):
        yield f"no node recorded the start of {target.worker}"
    if not witnesses.memberships(injection, target):
        yield f"no plan shows the rank of {target.worker}"


def _rank_of(plan: Record, worker: str) -> int | None:
    """Return the rank of a worker in a plan; None if it is no member."""
    return next((member["rank"] for member in plan["members"] if member["worker"] == worker), None)
