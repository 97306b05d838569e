"""Power cuts of machines below trainings that run already, from the job to the verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.attach.runs import assert_recovered, broken, records
from support.jobs.training import TrainingJob, training
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.experiment.run.running_job import GOES_ON
from chaoskit.faults import LoseMachine
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.vocabulary import Event, Verdict

WHY_NOT = pods.unavailable() or pods.no_tool()
pytestmark = [
    pytest.mark.costly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"Kubernetes: {WHY_NOT}"),
]
#: Seconds for which a machine is silent until the tests' control plane marks it as not ready.
GRACE_S = 20.0


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Allow power cuts of all machines, and wait for their ends after a test."""
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    monkeypatch.setenv(f"{VARIABLE}MACHINES", ",".join(pods.machines()))
    monkeypatch.setenv(f"{VARIABLE}LEVERS", pods.levers(tmp_path))
    monkeypatch.setenv(f"{VARIABLE}STRANGERS", "allow")
    yield
    for machine in pods.machines():
        wait_until(lambda machine=machine: pods.is_ready(machine), machine)


def machine_by_rank(job: TrainingJob) -> dict[int, str]:
    """Return the machine of each rank."""
    machine_of = {
        pod["spec"].get("hostname"): pod["spec"]["nodeName"] for pod in pods.pods().values()
    }
    return {step.rank: machine_of[step.pod] for step in job.recorded_steps()}


def rank_beside_none(job: TrainingJob) -> int:
    """Return a rank whose machine has no other rank. The rendezvous is in the pod of rank 0."""
    machines = machine_by_rank(job)
    return next(
        rank for rank in sorted(machines)[1:] if [*machines.values()].count(machines[rank]) == 1
    )


def test_a_job_goes_on_with_a_pod_on_another_machine(tmp_path: Path) -> None:
    """The control plane gives the machine up, and the controller of the Job replaces the pod."""
    with training("job", unreachable_s=1) as job:
        rank = rank_beside_none(job)
        machine = machine_by_rank(job)[rank]
        outcome = broken(job, tmp_path, LoseMachine(rank=rank, after_s=1.0), observe_s=2.0)
        assert_recovered(outcome, job)
        (ended,) = records(outcome, Event.LIFE_ENDED)
        lives = [
            life for life in records(outcome, Event.LIFE_OBSERVED) if life.source == ended.source
        ]
        assert [life["machine"] == machine for life in lives] == [True, False]
        assert machine_by_rank(job)[rank] != machine
        # a hand is in the successor although the machine is still silent
        ranks = [
            entry["rank"]
            for entry in records(outcome, Event.RANK_FOUND)
            if entry.source == ended.source
        ]
        assert ranks == [rank, rank]


def test_a_job_that_stands_still_until_its_machine_is_back_has_failed(tmp_path: Path) -> None:
    """A pod of a StatefulSet is not replaced as long as its machine is silent."""
    with training("statefulset") as job:
        rank = rank_beside_none(job)
        machine = machine_by_rank(job)[rank]
        stalled_s = GRACE_S + 20.0
        fault = LoseMachine(rank=rank, after_s=1.0)
        outcome = broken(job, tmp_path, fault, stalled_s=stalled_s)
        print("; ".join(outcome.reasons))
        assert outcome.verdict is Verdict.FAILED
        (standing,) = [check for check in outcome.checks if check.name == GOES_ON]
        assert f"no step was shown for {stalled_s:g} s (stalled_s)" in standing.detail
        assert f"the machine {machine} of llama-{rank} has been silent for" in standing.detail
        job.wait_for_step(job.newest_step() + 3)


def test_a_job_goes_on_once_its_machine_is_back(tmp_path: Path) -> None:
    with training("statefulset") as job:
        fault = LoseMachine(rank=rank_beside_none(job), after_s=1.0, back_after_s=GRACE_S + 5.0)
        outcome = broken(job, tmp_path, fault, observe_s=2.0)
        assert_recovered(outcome, job)
