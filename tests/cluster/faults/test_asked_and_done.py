"""A fault that struck another target than its plan names is detected, whatever the fault's own code
reports.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Self

import msgspec
import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.judge.fault_audit import audit
from chaoskit.experiment.plan.command_plan import plan_command
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.injected import injections
from chaoskit.runlog.outcome import Check
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Trigger
from faults import BadBatch, Kill
from faults.base import Fault
from faults.evidence import Evidence, RankProcess, ReadBack
from faults.target import Target

AT = 8  # the step in which faults strike


@dataclass(frozen=True, kw_only=True)
class KillsAnother(Kill):
    """A fault with a trigger that names another rank than its field."""

    def trigger(self, fault_id: str) -> Trigger | None:
        return msgspec.structs.replace(_trigger(super().trigger(fault_id)), rank=2)


@dataclass(frozen=True, kw_only=True)
class KillsTheHeaviest(Kill):
    """A fault with a trigger that names a role, and a field that names a rank."""

    def trigger(self, fault_id: str) -> Trigger | None:
        return msgspec.structs.replace(
            _trigger(super().trigger(fault_id)), rank=-1, role="most_shards"
        )


@dataclass(frozen=True, kw_only=True)
class KillsAny(Kill):
    """A fault that stops every rank, although its class does not declare that."""

    def trigger(self, fault_id: str) -> Trigger | None:
        return msgspec.structs.replace(_trigger(super().trigger(fault_id)), rank=-1)


@dataclass(frozen=True, kw_only=True)
class TouchesEvery(Fault):
    """A fault of a class in which the rank has no meaning."""

    rank: int = 0
    every_rank: ClassVar[bool] = True

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield ReadBack(subject=target.rank_process, source=target.worker, value="touched")


def _trigger(trigger: Trigger | None) -> Trigger:
    assert trigger is not None
    return trigger


def journals(
    *, rank: int, stood_in: str = "forward", peer: str = "", shards: tuple[int, ...] = (1, 1, 1)
) -> list[Record]:
    """Return the records of a run in which a fault struck a rank at its hook."""
    worker, pid = f"node{rank}.w0", 100 + rank
    place = {
        "worker": worker,
        "rank": rank,
        "node": f"node{rank}",
        "pid": pid,
        "step": AT,
        "phase": stood_in,
    }
    waiting = (peer and "node0.w0") or worker
    members = [
        {
            "rank": number,
            "worker": f"node{number}.w0",
            "node": f"node{number}",
            "shards": [*range(count)],
        }
        for number, count in enumerate(shards)
    ]
    hook = {
        "fault": "fault0",
        "step": AT,
        "generation": 2,
        "rank": rank,
        "phase": stood_in,
        "peer": peer,
    }
    evidence = {"subject": msgspec.to_builtins(RankProcess(worker, rank, pid))}
    return [
        Record(1, f"node{rank}", Event.WORKER_STARTED, {"worker": worker, "pid": pid}),
        Record(2, "coordinator", Event.PLAN, {"generation": 2, "abort": False, "members": members}),
        Record(3, waiting, Event.HOOK_STOPPED, hook),
        Record(
            4,
            "harness",
            Event.INJECTED,
            {"fault": "fault0", "nodes": [], "done_ns": 5, "waiting": waiting, **place},
        ),
        Record(
            6,
            "harness",
            Event.EVIDENCE,
            {"fault": "fault0", "observed": "it is gone", "evidence": evidence},
        ),
    ]


def judged(fault: Fault, records: list[Record]) -> list[Check]:
    return audit(injections([fault], records), records)


def assert_is_error(checks: list[Check], detail: str) -> None:
    assert [(check.verdict, check.detail) for check in checks] == [(Verdict.ERROR, detail)]


# -- the rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [KillsAnother, KillsTheHeaviest, KillsAny, Kill], ids=lambda kind: kind.__name__
)
def test_a_fault_that_struck_another_rank_is_an_error(kind: type[Kill]) -> None:
    """The field of the plan counts, whatever the trigger names."""
    assert_is_error(
        judged(kind(rank=1, at_step=AT), journals(rank=2)), "it struck rank 2, not rank 1"
    )
    assert judged(kind(rank=1, at_step=AT), journals(rank=1)) == []


@pytest.mark.parametrize(
    "fault", [BadBatch(at_step=AT), TouchesEvery(at_step=AT)], ids=lambda fault: fault.kind
)
def test_a_fault_whose_class_says_that_its_rank_has_no_meaning_may_strike_any(fault: Fault) -> None:
    assert judged(fault, journals(rank=2)) == []
    trigger = fault.trigger("fault0")
    assert trigger is not None
    assert (trigger.rank, trigger.role) == (-1, "")


def test_a_role_is_compared_with_the_membership() -> None:
    """The role names the rank with most shards, and the lowest rank of several with as many."""
    fault = Kill(rank="most_shards", at_step=AT)
    assert judged(fault, journals(rank=1, shards=(1, 2, 1))) == []
    assert judged(fault, journals(rank=0, shards=(2, 2, 1))) == []
    detail = "it struck rank 2, and rank 1 had most shards"
    assert_is_error(judged(fault, journals(rank=2, shards=(1, 2, 1))), detail)


def test_a_healer_is_the_rank_from_which_the_joiner_pulls() -> None:
    fault = Kill(rank="healer", during="restore")
    assert judged(fault, journals(rank=1, stood_in="restore", peer="node1.w0")) == []
    detail = "it struck node1.w0, and node0.w0 was about to take its state from node2.w0"
    assert_is_error(judged(fault, journals(rank=1, stood_in="restore", peer="node2.w0")), detail)


# -- the moment ------------------------------------------------------------------------------------


def test_a_fault_that_struck_in_another_phase_of_a_recovery_is_an_error() -> None:
    fault = Kill(rank=1, during="restore")
    assert judged(fault, journals(rank=1, stood_in="restore")) == []
    detail = "node1.w0 waited in recommit, not in restore of recovery 1"
    assert_is_error(judged(fault, journals(rank=1, stood_in="recommit")), detail)


# -- ranks that are drawn --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DrawsAnother(Kill):
    """A fault that expands to another rank than the user has named."""

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        return (type(self)(rank=2, at_step=self.at_step),)


@dataclass(frozen=True, kw_only=True)
class DrawsNone(Kill):
    """A fault that expands to nothing, and so leaves the plan."""

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        return ()


@pytest.mark.parametrize("kind", [DrawsAnother, DrawsNone], ids=lambda kind: kind.__name__)
def test_a_plan_that_strikes_something_else_than_asked_for_is_refused(kind: type[Kill]) -> None:
    fault = kind(rank=1, at_step=AT)
    with pytest.raises(BadInput, match="it has a rank already") as refused:
        plan_experiment("gpt", steps=20, nodes=3, faults=[fault])
    assert refused.value.field == "faults"
    watch = LogPatterns(step=r"step (\d+)")
    with pytest.raises(BadInput, match="it has a rank already"):
        plan_command(["true"], watch=watch, nodes=3, faults=[fault])


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_whose_fault_strikes_another_rank_is_an_error(chaos: Chaos) -> None:
    """The job recovers from the loss of rank 2, while the plan names rank 1."""
    plan: dict[str, Any] = {
        "nodes": 3,
        "spares": 1,
        "steps": 20,
        "options": {"step_s": 0.02},
        "check": False,
    }
    outcome = chaos.run(
        "../../jobs/failing/troubled.py:plain", faults=[KillsAnother(rank=1, at_step=AT)], **plan
    )
    assert outcome.verdict is Verdict.ERROR
    (check,) = [check for check in outcome.checks if check.name.endswith("struck what was planned")]
    assert check.detail == "it struck rank 2, not rank 1"
