"""A rank that survives the faults of other ranks finishes the same training run: tests with real
jobs and real faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag

from chaoskit.journal import Record, read_journals
from chaoskit.process.linux import children, is_ending
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import EndJob, Heartbeat, Plan, WorkerReady
from faults import Fault, Hang, Kill, NaN, Raise, Straggle

JOBS = "../../jobs/failing/troubled.py"
PLAIN = f"{JOBS}:plain"
WEIGHT, LAST = "0.weight", "3.weight"  # parameters of the jobs' model
DEADLINE_S = 60.0


def run(chaos: Chaos, job: str = PLAIN, **plan: Any) -> Outcome:
    """Run an experiment that must pass, small enough to be one of many."""
    settings = {"nodes": 3, "spares": 1, "steps": 20, "deadline_s": DEADLINE_S} | plan
    return chaos.run(job, **settings)


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def worlds(outcome: Outcome) -> list[int]:
    """Return the number of ranks that committed each step."""
    return [point.world for point in outcome.steps]


class Killer:
    """A watcher that kills workers from outside of their triggers, on any message of the
    coordinator.

    Args:
        act: called with the killer and each message until the job ends; it may call `kill`.
    """

    def __init__(self, act: Callable[[Killer, Any], None]) -> None:
        self._act = act
        self.pids: dict[str, int] = {}
        self.plans: list[Plan] = []
        self.victims: list[str] = []
        self.committed = 0
        self.over = False

    def __call__(self, message: Any) -> None:
        match message:
            case WorkerReady(worker, _, endpoint):
                self.pids[worker] = endpoint.pid
            case Plan():
                self.plans.append(message)
            case Heartbeat(_, beats):
                self.committed = max([self.committed, *(beat.step for beat in beats)])
            case EndJob():
                self.over = True
        if not self.over:
            self._act(self, message)

    @property
    def alive(self) -> list[str]:
        """The members of the last plan with living processes, by rank."""
        members = [member.worker for member in self.plans[-1].members] if self.plans else []
        return [
            name for name in members if name not in self.victims and not is_ending(self.pids[name])
        ]

    def kill(self, *workers: str) -> None:
        """Send SIGKILL to ``workers``, all of which are stopped first.

        Otherwise the last worker could still serve its state after the first one is gone.
        """
        for worker in workers:
            os.kill(self.pids[worker], signal.SIGSTOP)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # its agent may have ended a stopped rank
                os.kill(self.pids[worker], signal.SIGKILL)
        self.victims += workers


Act = Callable[[Killer, Any], None]


def run_with_kills(
    chaos: Chaos, act: Act, reached: Callable[[Killer], bool], **plan: Any
) -> tuple[Outcome, Killer]:
    """Run a job in which ``act`` may kill workers at any moment, and which goes on until ``reached``
    is True.

    The run must pass every check except "no false alarm": these kills are not planned faults.
    """
    killer = Killer(act)

    def is_reached(message: Any) -> bool:
        killer(message)
        return reached(killer)

    flag = Flag(
        Path(tempfile.mkdtemp(prefix="goal-", dir=chaos.harness.directory)) / "reached", is_reached
    )
    settings = {"check": False, "options": {"step_s": 0.02}} | plan
    outcome = run(chaos, watch=flag, until=flag.until, **settings)
    problems = [
        check
        for check in outcome.checks
        if check.verdict != Verdict.PASSED and check.name != "no false alarm"
    ]
    assert not problems, outcome.directory
    return outcome, killer


def is_full_again(killer: Killer, ranks: int) -> bool:
    """Return True if a world of ``ranks`` ranks was planned after the kills, without the killed
    workers.
    """
    members = {member.worker for member in killer.plans[-1].members} if killer.plans else set()
    return bool(killer.victims) and len(members) == ranks and members.isdisjoint(killer.victims)


# -- where in a step -------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "optimizer"])
def test_a_kill_in_any_phase(chaos: Chaos, phase: str, reduction: str) -> None:
    """A run survives a kill in each phase of a step.

    In the optimizer's phase some ranks have committed the step, and the others take the committed
    state over.
    """
    transport = "tcp" if phase in ("forward", "optimizer") else "auto"
    faults = [Kill(rank=1, at_step=7, phase=phase)]
    run(chaos, faults=faults, reduction=reduction, transport=transport, shards=8, buckets=2)


@pytest.mark.parametrize("phase", ["reduce", "optimizer"])
@pytest.mark.parametrize("spares", [0, 2])
def test_a_kill_in_the_last_step(chaos: Chaos, phase: str, spares: int) -> None:
    """A newcomer that finds the last step committed ends; it does not wait for a step that no rank
    takes.
    """
    run(chaos, spares=spares, faults=[Kill(rank=0, at_step=19, phase=phase)])


def test_whoever_is_behind_at_the_end_was_not_cut_short(chaos: Chaos) -> None:
    """A late rank and a replacement take over the state of the rank that committed the last step
    and returned.
    """
    faults = [
        Straggle(rank=2, at_step=19, delay_ms=300.0, steps=1),
        Kill(rank=0, at_step=19, phase="optimizer"),
    ]
    outcome = run(chaos, faults=faults, until={"spares": 1})
    assert journal(outcome, Event.RESTORED)
    assert {record["cut_short_by"] for record in journal(outcome, Event.FINISHED)} == {""}


def test_two_kills_in_one_step(chaos: Chaos) -> None:
    run(
        chaos,
        nodes=4,
        spares=2,
        faults=[Kill(rank=0, at_step=5, phase="optimizer"), Kill(rank=3, at_step=5)],
    )


@pytest.mark.promise(
    "survivors keep their rank where they can, and it grows again at a step boundary when a replacement is warm"
)
def test_down_to_two_and_up_again_is_bit_equal(chaos: Chaos) -> None:
    """A world without spares goes from 4 ranks to 2 and back to 4, with the losses of its twin.

    Replacements are started, and join at a step boundary.
    """
    kills = [Kill(rank=3, at_step=5), Kill(rank=1, at_step=6)]
    outcome = run(chaos, nodes=4, spares=0, shards=6, until={"world": 4}, faults=kills)
    assert min(worlds(outcome)) <= 3
    assert worlds(outcome)[-1] == 4
    outcome.assert_same_losses_as_twin()


# -- hangs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "gil", "spin"])
def test_a_hang_while_another_rank_dies(chaos: Chaos, how: str) -> None:
    """A rank that hangs stays in the old generation, and its absence from the new one is noticed."""
    faults: list[Fault] = [
        Hang(rank=1, at_step=8, phase="backward", how=how),
        Kill(rank=2, at_step=8, phase="reduce"),
    ]
    run(chaos, faults=faults, options={"step_s": 0.05})


@pytest.mark.promise(
    "it neither comes to the rendezvous nor leaves its old collective, for 2 s", how="spin"
)
@pytest.mark.parametrize("how", ["gil", "spin"])
def test_a_hang_that_looks_like_waiting(chaos: Chaos, how: str) -> None:
    """A rank that hangs in the reduction, where all others wait, is detected when it does not
    follow a new plan.
    """
    run(chaos, faults=[Hang(rank=1, at_step=8, phase="reduce", how=how)], options={"step_s": 0.05})


def test_the_only_rank_hangs_while_a_fresh_one_waits(chaos: Chaos) -> None:
    """No rank is left that has the state: the run goes on from the copies in the agents' memory."""
    faults = [Kill(rank=1, at_step=12, phase="reduce"), Hang(rank=0, at_step=12, how="spin")]
    outcome = run(chaos, nodes=2, spares=0, faults=faults, options={"step_s": 0.05})
    assert [record["cause"] for record in journal(outcome, Event.DETECTED)] == ["exited", "hung"]
    restored = journal(outcome, Event.RESTORED)
    assert {record["step"] for record in restored if record["source"].startswith("memory of ")} == {
        12
    }
    outcome.assert_same_losses_as_twin()


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.promise("of a NaN it may, if the job's own code does not bear it", waits=False)
@pytest.mark.parametrize(("waits", "cause"), [(False, "raised"), (True, "hung")])
def test_a_job_that_does_not_bear_a_nan_is_no_false_alarm(
    chaos: Chaos, waits: bool, cause: str
) -> None:
    """The job's own code notices the NaN first, and its rank is lost for another reason than
    numbers.
    """
    fault = NaN(rank=1, at_step=8, parameter="weight", where="weight")
    outcome = run(
        chaos,
        job="../../jobs/failing/troubled.py:vigilant",
        faults=[fault],
        options={"waits": waits},
    )
    assert [record["cause"] for record in journal(outcome, Event.DETECTED)] == [cause]
    assert [recovery.fault for recovery in outcome.recoveries] == [str(fault)]


@pytest.mark.parametrize("where", ["weight", "gradient", "activation"])
@pytest.mark.parametrize("sticky", [False, True])
def test_a_rank_that_computes_nan_is_replaced(chaos: Chaos, where: str, sticky: bool) -> None:
    fault = NaN(rank=1, at_step=6, parameter=LAST, where=where, sticky=sticky)
    outcome = run(chaos, shards=8, buckets=2, faults=[fault])
    assert {record["verdict"] for record in journal(outcome, Event.ATTRIBUTED)} == {"rank"}


def test_two_poisoned_ranks_are_both_replaced(chaos: Chaos) -> None:
    """Both ranks are replaced in one plan: a newcomer must not take its state from the second of
    them.
    """
    faults = [NaN(rank=rank, at_step=6, parameter=LAST, where="weight") for rank in (0, 2)]
    run(chaos, nodes=4, spares=2, faults=faults)


def test_a_poisoned_rank_cannot_judge(chaos: Chaos) -> None:
    """A rank with bad weights must not call another rank's shard a bad batch if no healthy rank is
    left.
    """
    faults = [
        NaN(rank=0, at_step=6, parameter=LAST, where="weight"),
        NaN(rank=1, at_step=6, parameter=LAST, where="gradient"),
    ]
    run(chaos, nodes=2, faults=faults)


def test_nan_on_every_rank_at_once_is_computed_again(chaos: Chaos) -> None:
    """The step is computed again and is finite: the run would be lost if all ranks were replaced."""
    job = f"{JOBS}:bad_at_first"
    outcome = run(chaos, job, options={"at_step": 5}, twin=False)
    assert {record["verdict"] for record in journal(outcome, Event.ATTRIBUTED)} == {"transient"}
    assert None not in outcome.losses


def test_an_audit_is_interrupted_by_a_kill(chaos: Chaos) -> None:
    faults = [
        NaN(rank=1, at_step=6, parameter=LAST, sticky=True),
        Kill(rank=2, at_step=6, phase="reduce"),
    ]
    run(chaos, nodes=4, spares=2, faults=faults)


@pytest.mark.parametrize(("nodes", "shards"), [(1, 4), (2, 8), (3, 3)])
def test_a_bad_batch_is_skipped_and_nobody_blamed(chaos: Chaos, nodes: int, shards: int) -> None:
    """All shards of a folded sum are suspects, but only shards that are bad on their own are
    reported.
    """
    bad = {"4": [1], "5": [0, 2], "9": [1]}
    plan = {"nodes": nodes, "shards": shards, "options": {"bad": bad}}
    outcome = run(chaos, f"{JOBS}:bad_batches", **plan)
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [4, 5, 9]
    assert outcome.ledger is not None
    assert outcome.ledger.skipped == [
        f"step {step}: shards {shards} are not finite" for step, shards in bad.items()
    ]


def test_ranks_of_different_age_agree_on_a_bad_batch(chaos: Chaos) -> None:
    """A newcomer agrees with ranks that took part in earlier audits, and a kill falls into an
    audit.
    """
    faults = [Kill(rank=0, at_step=6), Kill(rank=2, at_step=9, phase="reduce")]
    options = {"bad": {"4": [1], "9": [1], "10": [0]}, "value": float("inf")}
    run(chaos, f"{JOBS}:bad_batches", spares=2, options=options, faults=faults)


@pytest.mark.parametrize(("policy", "audits"), [("stop", 1), ("retry", 4)])
def test_a_bad_batch_ends_the_run_if_it_shall(chaos: Chaos, policy: str, audits: int) -> None:
    options = {"bad": {"4": [1]}}
    outcome = run(
        chaos, f"{JOBS}:bad_batches", options=options, nonfinite=policy, twin=False, check=False
    )
    assert "step 4: shards [1] give non-finite gradients" in outcome.reasons[0]
    opened = journal(outcome, Event.ATTRIBUTED)
    assert (
        max(Counter(record.source for record in opened).values()) == audits
    )  # the first rank that gives up ends the others


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("shards", [3, 8])
def test_a_sum_that_overflows_is_nobodys_fault(chaos: Chaos, shards: int, reduction: str) -> None:
    """The batch is bad if finite gradients overflow in a sum: in that of a rank or in that of all
    ranks.
    """
    outcome = run(
        chaos, f"{JOBS}:overflowing", options={"at_step": 5}, shards=shards, reduction=reduction
    )
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [5]
    assert journal(outcome, Event.CORRUPT) == []


def test_a_sum_that_overflows_while_a_rank_dies_ends_the_run_if_it_shall(chaos: Chaos) -> None:
    """The run ends although a newcomer has not seen the sum that the other ranks doubt (reduction
    ``fast``).
    """
    options, kill = {"at_step": 5}, Kill(rank=2, at_step=5, phase="reduce")
    plan = {"reduction": "fast", "nonfinite": "stop", "twin": False, "check": False}
    outcome = run(chaos, f"{JOBS}:overflowing", options=options, faults=[kill], **plan)
    assert "step 5: shards [0, 1, 2] give non-finite gradients" in outcome.reasons[0]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_more_shards_than_bits_in_a_word(chaos: Chaos, reduction: str) -> None:
    """The findings of an audit and the flags of shards that are not finite may need more than 64
    bits.
    """
    plan = {"nodes": 2, "shards": 96, "steps": 10, "reduction": reduction}
    outcome = run(
        chaos,
        "../../jobs/failing/troubled.py:wide",
        options={"bad": {"4": list(range(96))}},
        **plan,
    )
    assert outcome.losses[4] is None


# -- missing replacements --------------------------------------------------------------------------


@pytest.mark.promise(
    "Replacements that fail before they are ready are started again ever more slowly and cost no budget.",
    refuse=False,
)
@pytest.mark.parametrize("refuse", [False, True])
def test_replacements_that_cannot_be_built_do_not_end_the_run(
    chaos: Chaos, tmp_path: Path, refuse: bool
) -> None:
    """Replacements that fail are started again, and cost nothing of the failure budget."""
    options = {"marker": str(tmp_path / "trained"), "failures": 4, "step_s": 0.03, "refuse": refuse}
    plan: dict[str, Any] = {"nodes": 2, "spares": 0, "until": {"world": 2}, "deadline_s": 120.0}
    plan |= {"max_failures": 2, "faults": [Kill(rank=1, at_step=6)]}
    outcome = run(chaos, f"{JOBS}:late_ones_fail", options=options, **plan, twin=False, check=False)
    assert (
        next(check.verdict for check in outcome.checks if check.name == "training completed")
        == Verdict.PASSED
    )
    assert len(journal(outcome, Event.FAILED)) == 4
    assert worlds(outcome)[-1] == 2


def test_below_the_least_world_the_run_waits(chaos: Chaos) -> None:
    kills = [Kill(rank=rank, at_step=6) for rank in (1, 2)]
    outcome = run(chaos, spares=0, min_world=2, faults=kills)
    assert min(worlds(outcome)) >= 2


@pytest.mark.promise("more than `max_failures` losses")
def test_the_budget_ends_the_run(chaos: Chaos) -> None:
    faults = [Kill(rank=0, at_step=4), Raise(rank=1, at_step=8)]
    outcome = run(chaos, max_failures=1, faults=faults, check=False)
    assert "the failure budget is spent: 2 workers were lost, max_failures=1" in outcome.reasons[0]


@pytest.mark.promise("`fork=False` starts fresh interpreters instead, through the same protocol.")
def test_fresh_interpreters_instead_of_forks(chaos: Chaos) -> None:
    commands = set()

    def watch(message: Any) -> None:
        if isinstance(message, WorkerReady):
            commands.add(Path(f"/proc/{message.endpoint.pid}/cmdline").read_bytes().split(b"\0")[1])

    kill = Kill(rank=1, at_step=6)
    run(
        chaos,
        nodes=2,
        spares=0,
        fork=False,
        faults=[kill],
        twin=False,
        deadline_s=120.0,
        watch=watch,
    )
    assert commands == {b"-c"}, "a fork has the command line of the supervisor, python -m"


# -- kills at any moment ---------------------------------------------------------------------------


@pytest.mark.parametrize("spares", [0, 2])
def test_all_but_one_at_once(chaos: Chaos, spares: int) -> None:
    """The last rank trains alone, or with spares that take over its state; the full world comes
    back.
    """

    def act(killer: Killer, message: Any) -> None:
        if not killer.victims and killer.committed >= 4:
            killer.kill(*killer.alive[1:])

    plan = {"nodes": 4, "spares": spares, "shards": 6}
    outcome, killer = run_with_kills(chaos, act, lambda killer: is_full_again(killer, 4), **plan)
    (survivor,) = {member.worker for member in killer.plans[0].members}.difference(killer.victims)
    last = {member.worker for member in killer.plans[-1].members}
    assert len(killer.victims) == 3
    assert survivor in last
    assert len(last.difference(killer.victims)) == worlds(outcome)[-1] == 4
    restored = journal(outcome, Event.RESTORED)
    assert {record.source for record in restored} >= last - {survivor}, (
        "no newcomer made up its state"
    )
    if not spares:
        assert min(worlds(outcome)) == 1


def test_nobody_is_left(chaos: Chaos) -> None:
    """A spare that has no state takes the state of the lost ranks from the memory of their agents."""

    def act(killer: Killer, message: Any) -> None:
        if not killer.victims and killer.committed >= 4:
            killer.kill(*killer.alive)

    outcome, _ = run_with_kills(chaos, act, lambda killer: is_full_again(killer, 2), nodes=2)
    assert any(
        record["source"].startswith("memory of ") for record in journal(outcome, Event.RESTORED)
    )
    assert outcome.lost_steps == 0


def test_a_second_kill_while_a_plan_is_formed(chaos: Chaos) -> None:
    """The newcomer is killed as soon as the plan that answers the first kill is published."""

    def act(killer: Killer, message: Any) -> None:
        if len(killer.victims) == 0 and killer.committed >= 4:
            killer.kill(killer.alive[0])
        elif len(killer.victims) == 1 and isinstance(message, Plan):
            old = {member.worker for member in killer.plans[0].members}
            killer.kill(
                *[member.worker for member in message.members if member.worker not in old][:1]
            )

    outcome, killer = run_with_kills(chaos, act, lambda killer: len(killer.victims) == 2, spares=2)
    assert len(killer.victims) == 2, outcome.directory


def test_a_kill_while_a_rank_joins_at_a_step_boundary(chaos: Chaos) -> None:
    """Growth waits for a step that all ranks take; the loss of a rank is answered at once."""

    def act(killer: Killer, message: Any) -> None:
        if not killer.victims and killer.committed >= 4:
            killer.kill(killer.alive[2])
        elif len(killer.victims) == 1 and isinstance(message, Plan) and not message.abort:
            killer.kill(killer.alive[0])

    plan = {"spares": 0, "transport": "tcp"}
    _, killer = run_with_kills(chaos, act, lambda killer: len(killer.victims) == 2, **plan)
    assert len(killer.victims) == 2


def test_the_end_of_an_agent(chaos: Chaos) -> None:
    """A node is lost with all its workers, its spare included; the other nodes start what is
    missing.
    """

    def act(killer: Killer, message: Any) -> None:
        if not killer.victims and killer.committed >= 4:
            worker = next(name for name in killer.alive if name.startswith("node0."))
            fork_server = _parent(killer.pids[worker])
            killer.victims.append(worker)
            os.kill(_parent(fork_server), signal.SIGKILL)

    outcome, killer = run_with_kills(chaos, act, lambda killer: is_full_again(killer, 3))
    assert not [
        pid for name, pid in killer.pids.items() if name.startswith("node0.") and not is_ending(pid)
    ]
    assert worlds(outcome)[-1] == 3


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent = int(fields[1])
    assert pid in children(parent)
    return parent


@pytest.mark.parametrize("seed", range(6))
def test_random_kills(chaos: Chaos, seed: int) -> None:
    """A run survives kills at random moments and in quick succession, as long as one rank lives."""
    generator = random.Random(seed)
    nodes, moments = (
        generator.choice([2, 3, 4]),
        sorted(generator.randrange(1, 18) for _ in range(generator.choice([2, 3]))),
    )

    def act(killer: Killer, message: Any) -> None:
        while moments and killer.committed >= moments[0]:
            moments.pop(0)
            if len(killer.alive) > 1:
                killer.kill(generator.choice(killer.alive))

    settings = {"spares": generator.choice([0, 1, 2]), "shards": generator.choice([nodes, 6, 8])}
    settings["transport"] = generator.choice(["auto", "tcp"])
    _, killer = run_with_kills(chaos, act, lambda killer: not moments, nodes=nodes, **settings)
    assert killer.victims


@pytest.mark.parametrize("seed", range(8))
def test_random_faults(chaos: Chaos, seed: int) -> None:
    """A run survives two random faults, often in the same step, while a third rank lives."""
    generator = random.Random(100 + seed)
    nodes = generator.choice([3, 4])
    ranks, step = generator.sample(range(nodes), 2), generator.randrange(5, 14)
    faults = [_random_fault(generator, rank, step + generator.choice([0, 0, 1])) for rank in ranks]
    plan = {
        "spares": generator.choice([1, 2]),
        "shards": generator.choice([nodes, 6, 8]),
        "buckets": generator.choice([1, 2]),
    }
    outcome = run(chaos, nodes=nodes, faults=faults, options={"step_s": 0.02}, check=False, **plan)
    unmet = {check.verdict for check in outcome.checks} - {Verdict.PASSED}
    assert unmet <= {Verdict.UNKNOWN}, (faults, outcome.reasons)  # a fault may find its rank gone


def _random_fault(generator: random.Random, rank: int, step: int) -> Fault:
    phase = generator.choice(["forward", "backward", "reduce", "optimizer"])
    choices: list[Fault] = [
        Kill(rank=rank, at_step=step, phase=phase),
        Hang(
            rank=rank, at_step=step, phase="backward", how=generator.choice(["stop", "gil", "spin"])
        ),
        Raise(rank=rank, at_step=step, phase=phase),
        NaN(
            rank=rank,
            at_step=step,
            parameter=LAST,
            where=generator.choice(["weight", "gradient", "activation"]),
        ),
    ]
    return generator.choice(choices)
