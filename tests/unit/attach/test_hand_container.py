"""The ephemeral container of a hand, and why it does not run, from objects of pods."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.attach.hands.hand_container import (
    NETWORK,
    PROCESSES,
    HandImage,
    TargetUser,
    hand_container,
    hand_status,
    needed_user,
    refusal_of_pod,
    user_of,
)

IMAGE = HandImage("registry/hand:1")
USER = TargetUser(1000, 1001)


def pod(
    of_pod: dict[str, Any] | None = None,
    of_container: dict[str, Any] | None = None,
    phase: str = "Running",
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    containers = [{"name": "sidecar"}, {"name": "train", "securityContext": of_container}]
    statuses = [] if state is None else [{"name": "hand", "state": state}]
    return {
        "spec": {"securityContext": of_pod, "containers": containers},
        "status": {"phase": phase, "ephemeralContainerStatuses": statuses},
    }


@pytest.mark.parametrize(
    ("of_pod", "of_container", "user"),
    [
        ({"runAsUser": 1000, "runAsGroup": 1001}, None, USER),
        ({"runAsUser": 0, "runAsGroup": 1001}, {"runAsUser": 1000}, USER),
        ({"runAsUser": 1000}, None, None),  # the group is that of the user in the image
        (None, None, None),
    ],
)
def test_the_user_of_a_container_is_read_from_its_pod(
    of_pod: dict[str, Any] | None, of_container: dict[str, Any] | None, user: TargetUser | None
) -> None:
    assert user_of(pod(of_pod, of_container), "train") == user


def denied(pid: int, user: TargetUser) -> dict[str, Any]:
    return {"pid": pid, "needs": {"uid": user.uid, "gid": user.gid}}


def test_a_hand_needs_the_user_of_most_processes_that_it_may_not_read() -> None:
    """A first process of root that starts the others is not the target."""
    readable: dict[str, Any] = {"pid": 7}
    init = denied(1, TargetUser(0, 0))
    assert needed_user({"processes": [init, readable, denied(8, USER)]}) == USER
    assert needed_user({"processes": [init, denied(8, USER), denied(9, TargetUser(0, 0))]}) == (
        0,
        0,
    )
    assert needed_user({"processes": [readable]}) is None


def test_a_pod_with_namespaces_of_its_machine_gets_no_hand_on_them() -> None:
    """Such a hand would break the whole machine, or read processes of other jobs."""
    on_machine = pod()
    on_machine["spec"] |= {"hostNetwork": True, "hostPID": True}
    assert "hostNetwork" in refusal_of_pod(on_machine, NETWORK)
    assert "hostPID" in refusal_of_pod(on_machine, PROCESSES)
    shared = pod()
    shared["spec"]["shareProcessNamespace"] = True
    assert "shareProcessNamespace" in refusal_of_pod(shared, PROCESSES)
    assert refusal_of_pod(shared, NETWORK) == ""
    assert refusal_of_pod(pod(), NETWORK) == refusal_of_pod(pod(), PROCESSES) == ""
    assert "has ended" in refusal_of_pod(pod(phase="Failed"), NETWORK)


def test_a_hand_on_processes_has_the_user_of_its_target_and_no_capability() -> None:
    container = hand_container("hand", PROCESSES, IMAGE, "train", USER)
    security = container["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == USER
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["runAsNonRoot"] is True
    assert container["targetContainerName"] == "train"
    assert container["stdinOnce"] is True


def test_a_hand_on_processes_of_root_has_the_capabilities_that_they_may_have() -> None:
    container = hand_container("hand", PROCESSES, IMAGE, "train", TargetUser(0, 0))
    assert "capabilities" not in container["securityContext"]
    assert container["securityContext"]["runAsNonRoot"] is False


def test_a_hand_on_the_network_has_one_capability_and_no_target() -> None:
    container = hand_container("hand", NETWORK, IMAGE, "train", USER)
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert "targetContainerName" not in container


@pytest.mark.parametrize(
    ("phase", "state", "problem", "waits_for"),
    [
        ("Running", None, "", ""),
        ("Running", {"waiting": {"reason": "ContainerCreating"}}, "", "ContainerCreating"),
        (
            "Running",
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such\nhost"}},
            "its image cannot be pulled: ImagePullBackOff, no such host",
            "",
        ),
        (
            "Running",
            {"waiting": {"reason": "RunContainerError", "message": "/proc/7/ns/pid"}},
            "its target does not run: RunContainerError, /proc/7/ns/pid",
            "",
        ),
        (
            "Running",
            {"terminated": {"reason": "Error", "exitCode": 137}},
            "it has ended: exit code 137, Error",
            "",
        ),
        ("Succeeded", None, "the pod has ended (Succeeded): no container starts in it", ""),
    ],
)
def test_a_hand_that_will_not_run_is_known_by_the_state_of_its_container(
    phase: str, state: dict[str, Any] | None, problem: str, waits_for: str
) -> None:
    status = hand_status(pod(phase=phase, state=state), "hand")
    assert (status.is_running, status.problem, status.waits_for) == (False, problem, waits_for)


def test_a_hand_runs_once_its_container_does() -> None:
    assert hand_status(pod(state={"running": {}}), "hand").is_running
