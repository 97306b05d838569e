"""A job that cannot be broken and judged is refused before anything happens to it."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs.objects import indexed_job, job_pod, pod, stateful_pod, stateful_set, status

from chaoskit.attach.jobs.checks import (
    check_containers,
    check_object,
    check_owners,
    check_places,
    choose_containers,
)
from chaoskit.attach.jobs.kinds import KINDS
from chaoskit.attach.jobs.membership import PlaceKey, membership
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.jobs.tracker import JobTracker
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.rights import of_attach, of_session
from chaoskit.substrate.kubernetes.options import KubernetesOptions


def check(
    text: str, job: dict[str, Any] | None, pods: list[dict[str, Any]], container: str = ""
) -> dict[PlaceKey, str]:
    """Make all checks, and return the containers."""
    members = membership(parse_reference(text), job)
    tracker = JobTracker(members)
    tracker.list_job(job, 0, 0.0)
    tracker.list_pods(pods, 0, 0.0)
    check_object(members, tracker.job)
    check_owners(members, pods)
    places = tracker.places()
    check_places(members, "ml", places, pods)
    containers = choose_containers(members, places, container)
    check_containers(members, places, containers)
    return containers


def refusal(text: str, job: dict[str, Any] | None, pods: list[dict[str, Any]]) -> str:
    with pytest.raises(BadInput) as caught:
        check(text, job, pods)
    assert (caught.value.field, caught.value.value) == ("job", text)
    return caught.value.remedy


def three(**fields: Any) -> list[dict[str, Any]]:
    """Return the pods of the StatefulSet; ``fields`` are those of the last one."""
    return [stateful_pod(0), stateful_pod(1), stateful_pod(2, **fields)]


def test_a_job_whose_pods_all_run_is_accepted() -> None:
    containers = check("statefulset/llama", stateful_set(), three())
    assert containers == {PlaceKey("llama", index): "trainer" for index in range(3)}


def test_a_failed_pod_beside_its_successor_is_no_reason() -> None:
    pods = [
        job_pod(0, "old", phase="Failed"),
        *(job_pod(index, "new", created=9) for index in range(3)),
    ]
    assert len(check("job/train", indexed_job(), pods)) == 3


def test_no_pod() -> None:
    text = refusal("statefulset/llama", stateful_set(), [])
    assert text == "wait for its pods: namespace ml has none with app=llama"


def test_all_pods_ended() -> None:
    ended = [
        job_pod(0, "a", phase="Failed", statuses=[status("terminated", exitCode=1)]),
        job_pod(1, "b", phase="Succeeded", statuses=[status("terminated", exitCode=0)]),
    ]
    text = refusal("pods/app=x", None, ended)
    assert "all pods have ended: train-0-a Failed (exit code 1), train-1-b Succeeded" in text


def test_fewer_pods_than_it_asks_for() -> None:
    text = refusal("statefulset/llama", stateful_set(), three()[:2])
    assert text == "wait for its pods: it asks for 3, and 2 of them exist"
    pods = [job_pod(0, "a"), job_pod(1, "b"), job_pod(2, "c", phase="Failed")]
    text = refusal("job/train", indexed_job(), pods)
    assert text == "wait for its pods: it asks for 3, and 2 of them exist: no pod holds train[2]"


def test_indexes_that_have_succeeded_need_no_pod() -> None:
    pods = [job_pod(0, "a"), job_pod(1, "b"), job_pod(2, "c", phase="Succeeded")]
    assert len(check("job/train", indexed_job(succeeded=1), pods)) == 2


def test_a_crash_loop() -> None:
    waiting = status("waiting", 7, reason="CrashLoopBackOff", last={"exitCode": 3})
    text = refusal("statefulset/llama", stateful_set(), three(statuses=[waiting]))
    assert text == (
        "repair it first: container trainer of pod llama-2 is in a crash loop "
        "(7 restarts, the last time with exit code 3)"
    )


def test_a_container_that_does_not_run() -> None:
    ended = status("terminated", 1, exitCode=3, reason="Error")
    text = refusal("statefulset/llama", stateful_set(), three(statuses=[ended]))
    assert text == "wait for its pods: container trainer of pod llama-2 does not run (Error)"
    ended = status("terminated", 2, exitCode=3, reason="Error")
    text = refusal("statefulset/llama", stateful_set(), three(statuses=[ended]))
    assert "is in a crash loop (2 restarts, the last time with exit code 3)" in text


def test_a_pod_that_does_not_run_yet() -> None:
    pulling = status("waiting", reason="ImagePullBackOff", message="no such image")
    text = refusal("statefulset/llama", stateful_set(), three(phase="Pending", statuses=[pulling]))
    assert text == "wait for its pods: pod llama-2: ImagePullBackOff (no such image)"
    text = refusal("statefulset/llama", stateful_set(), three(phase="Pending"))
    assert text == "wait for its pods: pod llama-2 does not run yet"


def test_a_selector_that_matches_pods_of_several_jobs() -> None:
    pods = [stateful_pod(0), job_pod(0, "a"), pod("debug")]
    text = refusal("pods/app=x", None, pods)
    assert text.endswith("it matches those of job/train, pods without an owner, statefulset/llama")


@pytest.mark.parametrize(("condition", "outcome"), [("Complete", "complete"), ("Failed", "failed")])
def test_a_job_that_has_ended(condition: str, outcome: str) -> None:
    ended = {"type": condition, "status": "True", "reason": "R", "message": "m"}
    text = refusal("job/train", indexed_job(conditions=[ended]), [job_pod(0, "a")])
    assert text == f"name a job that runs: this one is {outcome} (R, m)"


def test_a_job_that_is_suspended() -> None:
    job = indexed_job()
    job["spec"]["suspend"] = True
    assert "it is suspended" in refusal("job/train", job, [])


def test_a_job_without_indexes() -> None:
    job = indexed_job()
    del job["spec"]["completionMode"]
    assert "as pods/batch.kubernetes.io/job-name=train" in refusal("job/train", job, [])


def test_a_trainjob_without_trainers() -> None:
    made = {"metadata": {"name": "x", "uid": "u"}, "spec": {"replicatedJobs": []}}
    assert "trainjob-ancestor-step=trainer: its JobSet has none" in refusal("trainjob/x", made, [])


def test_a_pod_with_several_containers_needs_a_name() -> None:
    pods = three(containers=("proxy", "trainer"))
    with pytest.raises(BadInput, match="pod llama-2 has proxy, trainer"):
        check("statefulset/llama", stateful_set(), pods)
    assert check("statefulset/llama", stateful_set(), pods, "trainer")[PlaceKey("llama", 2)]


def test_rights_for_a_job_that_runs_are_no_rights_of_sessions() -> None:
    attach = [(right.resource, *right.verbs) for right in of_attach(["TrainJob", "JobSet"])]
    assert attach == [
        ("namespaces", "get"),
        ("pods", "list"),
        ("pods", "watch"),
        ("trainjobs", "list"),
        ("jobsets", "list"),
        ("jobsets", "watch"),
    ]
    session = of_session(KubernetesOptions())
    assert not any("watch" in right.verbs for right in session)
    assert not {"trainjobs", "jobsets", "statefulsets"} & {right.resource for right in session}


def test_a_right_exists_for_each_kind() -> None:
    for kind in filter(None, (kind.watched for kind in KINDS.values())):
        assert len(of_attach([kind])) == len(of_attach([])) + 2
