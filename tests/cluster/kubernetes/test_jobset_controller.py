"""The stand-in for the controller of JobSets does what recordings of the real one have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.jobs import cluster, manifests, recordings, states
from support.jobs.controller import controllers
from support.jobs.observer import observed
from support.jobs.processes import kill_container
from support.nodes import pods
from support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
    pytest.mark.skipif(bool(recordings.missing()), reason=f"Kubernetes: {recordings.missing()}"),
]
RECORDINGS = ("kill_rank", "kill_container", "delete_pod", "power_cut")


def recorded_jobset() -> dict[str, Any]:
    """Return the JobSet of the recordings, with pods that only print."""
    added = next(
        observation["object"]
        for observation in recordings.recording("kill_container")
        if observation.get("kind") == "JobSet"
    )
    spec = copy.deepcopy(added["spec"])
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    own = manifests.pod_spec("trainer")
    own["containers"][0]["env"] = pod["containers"][0]["env"]
    pod |= {"containers": own["containers"], "volumes": own["volumes"]}
    return {"kind": "JobSet", "metadata": {"name": "train"}, "spec": spec}


def observe(fault: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the observations of a JobSet that a fault hits, until it trains again."""

    def is_ready(attempt: int) -> bool:
        (jobset,) = cluster.all_of("JobSet")
        status = jobset.get("status") or {}
        counts = status.get("replicatedJobsStatus") or [{}]
        conditions = {entry["type"]: entry["status"] for entry in status.get("conditions") or ()}
        is_over = conditions.get("RestartingJobSet", "False") == "False"
        return status.get("restarts") == attempt and counts[0].get("ready") == 1 and is_over

    with controllers(), observed() as observations, cluster.created(recorded_jobset()):
        wait_until(lambda: is_ready(0), "all pods")
        fault(next(name for name in sorted(pods.pods()) if "-0-1-" in name))
        wait_until(lambda: is_ready(1), "the second attempt")
        wait_until(
            lambda: states.jobset_states(observations)[-1:] == [states_of("delete_pod")[-1]],
            "the last event",
        )
        return list(observations)


def states_of(name: str) -> list[tuple[Any, ...]]:
    return states.jobset_states(recordings.recording(name))


#: States of pods that depend on which of two writers is faster, beside those of the recordings: the
#: kubelet reports the end of a deleted pod before the controller of Jobs has counted the pod.
RACES = {("0", is_gone, True, True, "Failed", "False", "terminated") for is_gone in (False, True)}


@pytest.mark.parametrize(
    ("name", "fault"), [("kill_container", kill_container), ("delete_pod", pods.delete)]
)
def test_states_labels_and_variables_are_those_of_the_recordings(
    name: str, fault: Callable[[str], None]
) -> None:
    observations = observe(fault)
    recorded = recordings.recording(name)
    assert set(states.jobset_states(observations)) == set(states_of(name))
    assert states.described_services(observations) == states.described_services(recorded)
    described = states.without_priority(states.described_jobs(observations))
    assert described == states.without_priority(states.described_jobs(recorded))
    assert states.described_pods(observations) == states.described_pods(recorded)
    for of in (states.job_states, states.pod_states):
        every = [of(recordings.recording(each)) for each in RECORDINGS]
        present = of(observations)
        assert present - set.union(*every) <= RACES
        assert set.intersection(*every) - present <= RACES
