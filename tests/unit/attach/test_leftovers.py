"""Leftovers of hands in pods: what is listed, what is deleted, and that none makes cleanup fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.nodes.api_server import api_server, refusal

from chaoskit.attach.doctor.trial_pod import LABELS
from chaoskit.attach.leftovers import LeftHands, describe_hands, left_hands
from chaoskit.attach.twin.objects import MARK
from chaoskit.cli.app import run

PODS = "/api/v1/namespaces/chaos/pods"
ENDED = {"terminated": {"exitCode": 0}}


def pod(
    name: str,
    *states: dict[str, Any] | None,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return a pod with a hand in each of these states, and a container of ``kubectl debug``."""
    hands = [f"chaoskit-hand-processes-{number}" for number in range(len(states))]
    statuses = [
        {"name": hand, "state": state}
        for hand, state in zip(hands, states, strict=True)
        if state is not None
    ]
    return {
        "metadata": {"name": name, "uid": f"uid of {name}", "labels": labels or {}},
        "spec": {"ephemeralContainers": [{"name": each} for each in ("debugger-x", *hands)]},
        "status": {"phase": phase, "ephemeralContainerStatuses": statuses},
    }


@pytest.mark.parametrize(
    ("states", "phase", "numbers"),
    [
        ([ENDED, ENDED], "Running", (2, 0)),
        ([ENDED, {"running": {}}, {"waiting": {}}, None], "Running", (1, 3)),
        ([None], "Failed", (1, 0)),
    ],
    ids=["ended", "standing", "pod has ended"],
)
def test_hands_in_a_pod_are_counted(
    states: list[dict[str, Any] | None], phase: str, numbers: tuple[int, int]
) -> None:
    left = left_hands([pod("llama-0", *states, phase=phase), pod("llama-1")])
    assert left == [LeftHands("llama-0", "uid of llama-0", *numbers)]


def test_lines_tell_what_cannot_be_removed_and_what_ends_by_itself() -> None:
    ended, standing = describe_hands(LeftHands("llama-0", "u", 1, 2))
    assert ended.startswith("llama-0: 1 container of hands ended, and cannot be removed")
    assert standing.startswith("llama-0: 2 containers of hands may run")
    assert "ends by itself within 10 s" in standing


@pytest.fixture
def machine_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """The exit status of cleanup without a namespace, which other runs of this machine decide."""
    monkeypatch.delenv("CHAOSKIT_KUBERNETES_CONTEXT", raising=False)
    monkeypatch.delenv("CHAOSKIT_KUBERNETES_NAMESPACE", raising=False)
    status = run(["cleanup"])
    capsys.readouterr()
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_NAMESPACE", "chaos")
    return status


def test_cleanup_lists_hands_and_deletes_pods_that_are_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine_status: int,
) -> None:
    items = [
        pod("llama-0", ENDED),
        pod("doctor-over", ENDED, phase="Failed", labels=LABELS),
        pod("doctor-in-use", labels=LABELS),
    ]

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return 200, {"items": items if path == PODS else []} if method == "GET" else {}

    with api_server(tmp_path, answer) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        assert run(["cleanup", "--json"]) == machine_status
        in_pods = json.loads(capsys.readouterr().out)["pods"]
        assert in_pods["hands"] == [
            {"pod": "llama-0", "uid": "uid of llama-0", "ended": 1, "standing": 0}
        ]
        assert (in_pods["removed_pods"], in_pods["problem"]) == (["doctor-over"], "")
        ((path, body),) = [
            (path, body) for method, path, body in server.requests if method == "DELETE"
        ]
        assert path == f"{PODS}/doctor-over"
        assert body["preconditions"] == {"uid": "uid of doctor-over"}
        assert run(["cleanup"]) == machine_status
        assert "llama-0: 1 container of hands ended" in capsys.readouterr().out


@pytest.mark.parametrize("is_refused", [True, False])
def test_cleanup_does_not_fail_because_of_a_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine_status: int,
    is_refused: bool,
) -> None:
    with api_server(tmp_path, lambda *request: refusal(403, "no right")) as server:
        kubeconfig = server.kubeconfig if is_refused else str(tmp_path / "none")
        monkeypatch.setenv("KUBECONFIG", kubeconfig)
        assert run(["cleanup"]) == machine_status
        output = capsys.readouterr().out
    assert "the pods of namespace chaos are not known" in output
    assert ("no right" in output) is is_refused


def test_cleanup_lists_second_jobs_with_the_command_that_deletes_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine_status: int,
) -> None:
    """None is deleted: their run may go on. A kind that the cluster lacks has no objects."""
    twin = {"metadata": {"name": "llama-twin", "uid": "u", "labels": {MARK: "m1"}}}

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        match path.rpartition("/")[2]:
            case "statefulsets" | "services":
                return 200, {"items": [twin]}
            case "trainjobs":
                return refusal(404, "the server could not find the requested resource")
            case "pytorchjobs":
                return refusal(403, "no right")
            case _:
                return 200, {"items": []}

    with api_server(tmp_path, answer) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        assert run(["cleanup"]) == machine_status
        output = " ".join(capsys.readouterr().out.split())
        assert "StatefulSet llama-twin: belongs to the second job of a run" in output
        assert "kubectl --namespace chaos delete statefulsets.apps llama-twin" in output
        assert "kubectl --namespace chaos delete services llama-twin" in output
        assert "the second jobs in namespace chaos are not all known: no right" in output
        assert {method for method, _, _ in server.requests} == {"GET"}
