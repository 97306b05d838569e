"""Jobs that train on the tests' cluster come back after killed, stopped and deleted ranks.

The suite of attached jobs breaks them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import pytest
from support.hand.client import UID
from support.jobs import recordings
from support.jobs.training import PodSecurity, TrainingJob, TrainingKind, training
from support.nodes import pods
from support.waiting import wait_until

pytestmark = [
    pytest.mark.costly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
    pytest.mark.skipif(bool(recordings.missing()), reason=f"Kubernetes: {recordings.missing()}"),
]
#: Far above the usual 10 to 15 s, but below the time that an agent alone needs to give up a stopped
#: rank: the limit of a collective, and 30 s for its end.
RECOVERY_LIMIT_S = 60.0
CHECKPOINT_EVERY = 5
KINDS: tuple[TrainingKind, ...] = get_args(TrainingKind)


def logged_step(pod: str) -> int:
    """Return the last step that a pod has printed; 0 before the first."""
    lines = [line.split() for line in pods.log(pod).splitlines()]
    steps = [int(words[1]) for words in lines if words[:1] == ["step"] and words[2] == "loss"]
    return steps[-1] if steps else 0


def first_pod() -> str:
    """Return the name of the pod with index 0."""
    (name,) = (
        name
        for name, pod in pods.pods().items()
        if pod["spec"]["hostname"].endswith("-0") and not pod["metadata"].get("deletionTimestamp")
    )
    return name


def check_comes_back(job: TrainingJob, fault: str) -> None:
    """Check that a job trains again after a fault that is in effect."""
    after_ns = time.monotonic_ns()
    recovery_s = job.recovery_s(after_ns)
    print(f"{job.reference}: {fault}: trains again after {recovery_s:.1f} s")
    assert 0.2 < recovery_s < RECOVERY_LIMIT_S
    steps = job.recorded_steps()
    newest = max(step.step for step in steps if step.at_ns <= after_ns)
    repeated = min(step.step for step in steps if step.at_ns > after_ns)
    assert repeated > newest - 2 * CHECKPOINT_EVERY
    logged = logged_step(first_pod())
    wait_until(lambda: logged_step(first_pod()) > logged, "a step in the log", poll_s=0.1)
    assert {step.rank for step in job.recorded_steps()[-6:]} == {0, 1, 2}


def check_nothing_stays(directory: Path) -> None:
    assert not directory.exists()
    assert not pods.pods()
    volumes = pods.ask("GET", "/api/v1/persistentvolumes")["items"]
    assert not [
        volume["metadata"]["name"]
        for volume in volumes
        if volume["metadata"]["name"].startswith(f"{pods.NAMESPACE}-")
    ]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_job_goes_on_from_its_checkpoint_when_a_rank_is_killed(kind: TrainingKind) -> None:
    with training(kind) as job:
        assert job.reference == f"{kind}/llama"
        job.wait_for_step(4 * CHECKPOINT_EVERY)
        job.rank_process(1).kill()
        check_comes_back(job, "rank 1 is killed")
    check_nothing_stays(job.directory)


def test_a_statefulset_goes_on_after_a_killed_and_a_stopped_rank_and_a_deleted_pod() -> None:
    """The deleted pod has the rendezvous."""
    with training("statefulset") as job:
        job.wait_for_step(4 * CHECKPOINT_EVERY)
        job.rank_process(1).kill()
        check_comes_back(job, "rank 1 is killed")
        process = job.rank_process(1)
        process.suspend()
        check_comes_back(job, "rank 1 is stopped")
        assert not process.is_running()
        pods.delete(first_pod())
        check_comes_back(job, "pod 0 is deleted")
    check_nothing_stays(job.directory)


@pytest.mark.parametrize(
    ("level", "as_root"), [("restricted", False), ("baseline", True), ("privileged", True)]
)
def test_a_training_has_the_rights_that_were_asked_for(level: PodSecurity, as_root: bool) -> None:
    with training("statefulset", pod_security=level, as_root=as_root, nodes=1) as job:
        assert job.rank_process(0).uids().real == (0 if as_root else UID)
        enforced = pods.ask("GET", f"/api/v1/namespaces/{job.namespace}")["metadata"]["labels"]
        assert enforced["pod-security.kubernetes.io/enforce"] == level
    check_nothing_stays(job.directory)


def test_a_job_ends_after_its_last_step() -> None:
    with training("job", nodes=1, steps=30) as job:
        wait_until(
            lambda: [pod["status"]["phase"] for pod in pods.pods().values()] == ["Succeeded"],
            "the end of the job",
        )
        assert job.newest_step() == 30
        assert logged_step(first_pod()) == 30
