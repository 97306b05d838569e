"""Collectives of user code in real jobs: one result on every rank, whatever breaks, and refusals of
misuse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chaoskit import BadInput, Chaos, Outcome, Verdict
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.suites.goals import worlds_seen
from faults import Fault, Kill, Scale

JOB = "../../jobs/training/calling.py"
FAULT_STEP = 6  # as in the job


class Noted(NamedTuple):
    """The results of the collectives behind one step on one rank."""

    score: str  # result of an evaluation over shards: the same in every run
    total: str  # result over numbers that differ in each call
    broadcast: str  # a number that rank 0 drew


def run(
    chaos: Chaos, notes: Path, *faults: Fault, job: str = JOB, **plan: Any
) -> tuple[Outcome, dict[str, dict[int, Noted]]]:
    """Run a job; return the outcome, and the results that each worker noted, by step."""
    notes.mkdir()
    settings = {"nodes": 3, "spares": 1, "shards": 4, "steps": 20, "twin": False} | plan
    settings["options"] = {"notes": str(notes)} | settings.get("options", {})
    outcome = chaos.run(job, faults=faults, **settings)
    results = {}
    for file in notes.glob("*.*"):
        lines = [line.split() for line in file.read_text().splitlines()]
        results[file.name] = {int(step): Noted(*rest) for step, *rest in lines}
    return outcome, results


def agreed(noted: dict[str, dict[int, Noted]]) -> dict[int, Noted]:
    """Return the results behind each step, which must be the same on all ranks."""
    steps = sorted({step for of_worker in noted.values() for step in of_worker})
    results_of = {step: {of[step] for of in noted.values() if step in of} for step in steps}
    assert [step for step, results in results_of.items() if len(results) > 1] == []
    return {step: results.pop() for step, results in results_of.items()}


def scores(noted: dict[str, dict[int, Noted]], last: int) -> list[str]:
    """Return the results of the evaluation behind the first steps."""
    results = agreed(noted)
    return [results[step].score for step in range(1, last + 1)]


@pytest.mark.promise(
    "A reduction over shards has the same bits at every world size", where="between"
)
@pytest.mark.promise("One call has one result on every rank, whatever breaks")
@pytest.mark.promise(
    "a rank that joins is given the results since the last commit", where="between"
)
@pytest.mark.parametrize("where", ["before", "evaluation", "between"])
def test_a_rank_that_is_killed_around_a_call(chaos: Chaos, tmp_path: Path, where: str) -> None:
    """The successor of a killed rank takes part from the place of the kill on.

    The place is before any call, in the middle of one, or between two. Between two, the successor
    has made neither: it is given the result of the first one.
    """
    _, unbroken = run(chaos, tmp_path / "unbroken", nodes=2, spares=0)
    options, until = {"where": where}, {"world": 3, "spares": 1}
    outcome, noted = run(chaos, tmp_path / "broken", check=False, until=until, options=options)
    assert scores(noted, 20) == scores(unbroken, 20)
    detected = outcome.records("detected")
    assert len({record["worker"] for record in detected}) == 1, detected
    dead = detected[0]["worker"]
    first = {member["worker"] for member in outcome.records("plan")[0]["members"]}
    last = len(outcome.steps)
    for worker in first - {dead}:
        assert list(noted[worker]) == list(range(1, last + 1))
    assert list(noted[dead]) == list(range(1, FAULT_STEP))
    (successor,) = noted.keys() - first
    begun = min(noted[successor])
    assert list(noted[successor]) == list(range(begun, last + 1))
    # Without a call before, the rank that died may have been the only one to commit the step.
    assert begun == FAULT_STEP or (begun == FAULT_STEP - 1 and where != "between")


def test_the_world_shrinks_in_the_middle_of_a_call(chaos: Chaos, tmp_path: Path) -> None:
    """The ranks that are left compute the shards of the lost one, and the evaluation is complete."""
    _, unbroken = run(chaos, tmp_path / "unbroken", nodes=4, spares=0)
    options = {"where": "evaluation"}
    outcome, noted = run(
        chaos, tmp_path / "broken", spares=0, check=False, options=options, until={"world": 3}
    )
    assert 2 in {point.world for point in outcome.steps}
    assert scores(noted, 20) == scores(unbroken, 20)


@pytest.mark.parametrize("phase", ["reduce", "optimizer"])
def test_a_rank_that_is_killed_within_the_step(chaos: Chaos, tmp_path: Path, phase: str) -> None:
    """Ranks that have committed the step call, and wait for those that take it over."""
    _, noted = run(
        chaos, tmp_path / "notes", Kill(rank=1, at_step=6, phase=phase), until={"world": 3}
    )
    agreed(noted)


def test_a_world_that_shrinks_and_grows(chaos: Chaos, tmp_path: Path) -> None:
    """The calls behind the last step of a world are those of the next one: leaving ranks make none
    of them.
    """
    goal = worlds_seen(chaos, 3, 2, 3)
    policy = ElasticPolicy(min_replicas=2, max_replicas=3, scaling_timeout_s=0)
    outcome, noted = run(
        chaos,
        tmp_path / "notes",
        *(Scale(to=2, at_step=6), Scale(to=3, at_step=20)),
        spares=0,
        elastic=policy,
        steps=40,
        until=goal.until,
        watch=goal,
    )
    assert outcome.lost_steps == 0
    assert len(agreed(noted)) == len(outcome.steps)


def test_a_rank_that_is_slow_in_a_call_is_waited_for(chaos: Chaos, tmp_path: Path) -> None:
    """A rank may be slower than any phase of a step, and ranks that wait for it are not taken to
    hang.
    """
    outcome, noted = run(
        chaos, tmp_path / "notes", spares=0, options={"where": "evaluation", "act": "slow"}
    )
    assert not outcome.records("detected")
    assert len(outcome.records("plan")) == 1
    assert len(agreed(noted)) == 20


def test_a_rank_that_hangs_in_a_call_is_found(chaos: Chaos, tmp_path: Path) -> None:
    """The limit for user code between two steps detects the hang."""
    options, until = {"where": "evaluation", "act": "hang"}, {"world": 3, "spares": 1}
    outcome, noted = run(
        chaos, tmp_path / "notes", check=False, outside_limit_s=3.0, options=options, until=until
    )
    assert [record["cause"] for record in outcome.records("detected")] == ["hung"]
    assert len(agreed(noted)) == len(outcome.steps)


@pytest.mark.parametrize("where", ["", "evaluation", "between"])
def test_a_sharded_job(chaos: Chaos, tmp_path: Path, where: str) -> None:
    """The evaluation needs all ranks for each shard; after a fault all repeat the calls of a step,
    or none.
    """
    options = {"where": where}
    outcome, noted = run(
        chaos, tmp_path / "notes", job=f"{JOB}:sharded", check=not where, options=options
    )
    assert bool(outcome.records("detected")) == bool(where)
    agreed(noted)
    assert max(step for of_worker in noted.values() for step in of_worker) == 20


@pytest.mark.parametrize("where", ["", "evaluation"])
def test_a_final_evaluation_of_a_sharded_job(chaos: Chaos, tmp_path: Path, where: str) -> None:
    """Ranks that enter again with the last step take no other one, and make the calls behind the
    loop.
    """
    options = {"where": where}
    outcome, noted = run(
        chaos,
        tmp_path / "notes",
        job=f"{JOB}:sharded_final",
        steps=FAULT_STEP,
        check=not where,
        options=options,
    )
    assert outcome.records("job_ended")[0]["ok"], outcome.reasons
    assert bool(outcome.records("detected")) == bool(where)
    assert list(agreed(noted)) == [FAULT_STEP]


@pytest.mark.parametrize("job", ["wrongly", "sharded_wrongly"])
@pytest.mark.parametrize(
    "how", ["before a transaction", "before the loop", "in the loop", "in a call"]
)
def test_a_call_that_is_not_between_two_steps_is_refused(chaos: Chaos, job: str, how: str) -> None:
    with pytest.raises(BadInput, match=r"behind the loop over step\.shards") as refused:
        chaos.run(f"{JOB}:{job}", nodes=2, spares=0, steps=10, options={"how": how}, twin=False)
    assert refused.value.field.startswith("trainer.")


@pytest.mark.parametrize("job", ["wrongly", "sharded_wrongly"])
@pytest.mark.parametrize("how", ["in another order"])
def test_ranks_that_call_different_things_are_refused(chaos: Chaos, job: str, how: str) -> None:
    with pytest.raises(BadInput, match="the same calls in the same order on every rank"):
        chaos.run(f"{JOB}:{job}", nodes=2, spares=0, steps=10, options={"how": how}, twin=False)


def test_a_call_on_one_rank_is_refused(chaos: Chaos) -> None:
    """The others wait in the next step for that rank: the world is formed again, and they report it
    there.
    """
    with pytest.raises(BadInput, match="rank 1 has entered the next step"):
        chaos.run(
            f"{JOB}:wrongly",
            nodes=2,
            spares=0,
            steps=10,
            options={"how": "on one rank"},
            twin=False,
        )


@pytest.mark.promise("`torch.distributed` has no process group in a job that is not sharded")
@pytest.mark.parametrize(
    ("job", "how"), [("wrongly", "without a group"), ("sharded_wrongly", "before the mesh")]
)
def test_torch_distributed_without_a_group_is_a_failure_of_the_job(
    chaos: Chaos, job: str, how: str
) -> None:
    """The verdict is ``failed`` and never ``error``, also in the unbroken run; the last line names
    the methods to call.
    """
    outcome = chaos.run(
        f"{JOB}:{job}", nodes=2, spares=0, steps=10, options={"how": how}, check=False
    )
    assert outcome.verdict == Verdict.FAILED
    names = ("trainer.all_reduce", "trainer.broadcast", "trainer.barrier")
    assert any(all(name in reason for name in names) for reason in outcome.reasons), outcome.reasons


def test_torch_distributed_in_a_sharded_job(chaos: Chaos) -> None:
    """A sharded job has the groups of the model, for calls of user code as well."""
    options = {"how": "without a group"}
    chaos.run(f"{JOB}:sharded_wrongly", nodes=2, spares=0, steps=10, options=options, twin=False)
