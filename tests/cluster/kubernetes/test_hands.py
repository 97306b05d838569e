"""Hands that are started in pods of a real cluster, by the client that makes requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from support.hand.client import directory
from support.hand.in_pods import PYTHON, mounts, pod, status
from support.jobs import cluster, manifests
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandImage
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.attach.hands.start import HandPod, start_hand, why_no_hand
from chaoskit.attach.preview import preview_job
from chaoskit.cli.app import run
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
IDLE = "import time; time.sleep(600)"
RANKED = """
import os, subprocess, sys
environment = {**os.environ, "RANK": "3"}
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
"""


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
    with closing(KubernetesApi(namespace=pods.namespace(), kubeconfig=kubeconfig)) as client:
        yield client


def image() -> HandImage:
    command = (PYTHON, "-S", "-m", "hand")
    return HandImage(pods.IMAGE, command, str(directory()), tuple(mounts()))


def target(name: str) -> HandPod:
    return HandPod(name, pods.pods()[name]["metadata"]["uid"])


def test_a_pod_that_was_replaced_by_another_one_gets_no_hand(api: KubernetesApi) -> None:
    with pod("hands-replaced", IDLE) as name:
        former = HandPod(name, "the UID of an earlier pod")
        assert "another one has its name" in why_no_hand(api, former, "main", PROCESSES, image())
        with pytest.raises(HarnessError, match="another one has its name"):
            start_hand(api, former, "main", PROCESSES, image())
        assert not pods.pods()[name]["spec"].get("ephemeralContainers")


def test_a_hand_reads_the_ranks_of_processes_and_kills_one(api: KubernetesApi) -> None:
    """The hand has the user that the pod sets."""
    with pod("hands-rank", RANKED, restarts=False) as name:
        with closing(start_hand(api, target(name), "main", PROCESSES, image())) as hand:
            ranked = wait_until(
                lambda: [
                    process
                    for process in hand.ask("list")["processes"]
                    if process["variables"].get("RANK") == "3"
                ],
                "the rank",
            )
            (process,) = ranked
            assert hand.kill(process["pid"], process["ticks"])["by"] == "signal"
        wait_until(lambda: status(name)["phase"] == "Succeeded", "the end of the pod")
        assert "has ended (Succeeded)" in why_no_hand(api, target(name), "main", PROCESSES, image())
        with pytest.raises(HarnessError, match="has ended"):
            start_hand(api, target(name), "main", PROCESSES, image())


def test_the_kernel_of_a_container_is_unknown_without_its_hand_and_gone_after_its_end(
    api: KubernetesApi,
) -> None:
    """The hand dies with pid 1. The status of the pod proves the end of the others."""
    with pod("hands-kernel", RANKED, restarts=False) as name:

        def is_over() -> bool:
            return status(name)["phase"] == "Failed"

        with closing(start_hand(api, target(name), "main", PROCESSES, image())) as hand:
            kernel = HandKernel(lambda: hand, is_over)
            root = kernel.find(1)
            ((rank, launched),) = wait_until(
                lambda: kernel.launched_ranks(root).items(), "the rank"
            )
            assert launched == LaunchedRank(3, "RANK")
            assert kernel.tree(root) == [root, rank]
            for process in (root, rank):
                process.signal(signal.SIGSTOP)
                assert process.is_stopped()
                process.signal(signal.SIGCONT)
                assert not process.is_stopped()
            root.signal(signal.SIGKILL)
            with pytest.raises(ProcessLookupError):
                wait_until(
                    lambda: raises_until_over(lambda: rank.signal(signal.SIGSTOP)), "the end"
                )
            assert rank.is_gone()
            assert kernel.tree(root) == []


def raises_until_over(act: Callable[[], None]) -> None:
    """Carry out an act. Until the end of the container is proved, its hand does not answer."""
    with contextlib.suppress(NodeUnreachable):
        act()


def test_the_user_of_a_target_is_found_out_by_a_first_hand(api: KubernetesApi) -> None:
    """The pod leaves its user to the image, which has root."""
    with pod("hands-user", IDLE, rights={}) as name:
        with closing(start_hand(api, target(name), "main", PROCESSES, image())) as hand:
            hello = hand.ask("hello")
            assert hello["uid"] == 0
            init = next(process for process in hello["processes"] if process["pid"] == 1)
            assert init["environ"] == "read"
            stop = hand.ask("stop", pid=1, ticks=init["ticks"], lasts_s=5)
            assert stop["held"] is True
        hands = pods.pods()[name]["spec"]["ephemeralContainers"]
        assert len(hands) == 2


@pytest.mark.costly
def test_an_image_that_cannot_be_pulled_is_known_before_the_limit(api: KubernetesApi) -> None:
    with pod("hands-image", IDLE) as name:
        began_s = time.monotonic()
        with pytest.raises(HarnessError, match="its image cannot be pulled"):
            start_hand(
                api, target(name), "main", PROCESSES, HandImage("local.test/none:1"), limit_s=120
            )
        assert time.monotonic() - began_s < 120


def test_a_hand_that_cannot_be_started_is_known_without_starting_it(api: KubernetesApi) -> None:
    """Pod Security answers the trial: the level ``restricted`` allows no hand on the network."""
    name = "hands-restricted"
    path = "/api/v1/namespaces"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    pods.ask("POST", path, {"metadata": {"name": name, "labels": labels}})
    try:
        wait_until(lambda: account_exists(name), "the account of the namespace")
        context = {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {"name": "main", "image": "local.test/pause:1", "securityContext": context}
        pods.ask(
            "POST",
            f"{path}/{name}/pods",
            {"metadata": {"name": "target"}, "spec": {"containers": [container]}},
        )
        kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
        with closing(KubernetesApi(namespace=name, kubeconfig=kubeconfig)) as restricted:
            plain = HandImage("registry/hand:1")
            made = HandPod("target", restricted.get("Pod", "target")["metadata"]["uid"])
            assert why_no_hand(restricted, made, "main", PROCESSES, plain) == ""
            reason = why_no_hand(restricted, made, "main", NETWORK, plain)
            assert "violates PodSecurity" in reason
            assert "NET_ADMIN" in reason
            assert not restricted.get("Pod", "target")["spec"].get("ephemeralContainers")
    finally:
        pods.ask("DELETE", f"{path}/{name}")


def account_exists(namespace: str) -> bool:
    accounts = pods.ask("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts")["items"]
    return bool(accounts)


def stateful_set() -> dict[str, Any]:
    """Return a StatefulSet of two pods, with two ranks in each."""
    start = "RANK={} sleep 600 &"
    script = (
        f"n=${{HOSTNAME##*-}}; {start.format('$((2 * n))')} {start.format('$((2 * n + 1))')} wait"
    )
    manifest = manifests.stateful_set("hands-set")
    spec = manifest["spec"]["template"]["spec"]
    manifest["spec"]["replicas"] = 2
    spec["volumes"].append({"name": "hand", "hostPath": {"path": str(directory())}})
    (container,) = spec["containers"]
    container["command"] = ["/bin/sh", "-c", script]
    container["securityContext"] = {"runAsUser": 1000, "runAsGroup": 1000}
    return manifest


def test_a_preview_shows_ranks_and_hands_of_each_pod(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line asks for hands without changing a pod."""
    with cluster.created(stateful_set()):
        wait_until(
            lambda: len([pod for pod in pods.pods("app=hands-set").values() if is_ready(pod)]) == 2,
            "two pods",
        )
        monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
        monkeypatch.setenv("CHAOSKIT_KUBERNETES_NAMESPACE", pods.namespace())
        arguments = ["cluster", "job", "statefulset/hands-set", "--json"]
        assert run([*arguments, "--hand-image", "registry/hand:1"]) == 0
        shown = json.loads(capsys.readouterr().out)
        pods_before = pods.pods("app=hands-set")
        for place, (name, pod_object) in zip(
            shown["places"], sorted(pods_before.items()), strict=True
        ):
            assert (place["pod"], place["uid"]) == (name, pod_object["metadata"]["uid"])
            assert place["node"] == pod_object["spec"]["nodeName"]
            assert place["refusals"] == {PROCESSES: "", NETWORK: ""}
            assert place["ranks"] == []
            assert not pod_object["spec"].get("ephemeralContainers")
        preview = preview_job(api, "statefulset/hands-set", image(), reads_ranks=True)
        assert [place.ranks for place in preview.places] == [(0, 1), (2, 3)]
        assert run(["cluster", "job", "statefulset/hands-sett"]) == 2
        assert "write statefulset/hands-set" in capsys.readouterr().err


def is_ready(pod_object: dict[str, Any]) -> bool:
    conditions = pod_object["status"].get("conditions", ())
    return any((entry["type"], entry["status"]) == ("Ready", "True") for entry in conditions)
