"""Refusals before any object is made on a cluster: by rights, quotas, machines and plans.

Asks no cluster.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.nodes.api_server import api_server, kubeconfig, refusal

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import (
    ClusterFinding,
    Examination,
    examine_cluster,
    refusal_of,
    refusal_of_rights,
    session_objects,
    session_pods,
)
from chaoskit.substrate.kubernetes.machines.machines import BROKEN, PROTECTED, why_not_breakable
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import pod_placement, quotas
from chaoskit.substrate.kubernetes.pods.actions import MachineDrain
from chaoskit.substrate.kubernetes.pods.diagnosis import PodsBarred
from chaoskit.substrate.kubernetes.pods.manifests import ALLOWED, ALLOWED_VALUE, SESSION
from chaoskit.substrate.kubernetes.preflight import (
    FirstRefusal,
    Preflight,
    require_all,
    require_possible,
)
from chaoskit.substrate.kubernetes.session import require_allowed
from chaoskit.substrate.kubernetes.template import require_mounted

OPTIONS = KubernetesOptions(image="registry/train:1", namespace="chaos", harness="pod")

# -- quotas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("2", 2),
        ("500m", "0.5"),
        ("1Gi", 2**30),
        ("1G", 10**9),
        ("1e3", 1000),
        ("2E3", 2000),
        (3, 3),
        ("100k", 100_000),
    ],
)
def test_quantities_are_those_of_kubernetes(quantity: object, expected: Any) -> None:
    assert quotas.amount(quantity) == Decimal(expected)


@pytest.mark.parametrize("quantity", ["", "much", "1Xi", "Gi"])
def test_what_is_no_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quotas.amount(quantity)


def container(**requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests, "limits": requests}}


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    status = {"hard": hard, "used": used or {}}
    return {"metadata": {"name": "small"}, "spec": {"hard": hard, **spec}, "status": status}


NODE = {"spec": {"containers": [container(cpu="2", memory="1Gi")]}}


@pytest.mark.parametrize(
    ("quota", "count", "told"),
    [
        (quota({"pods": "3"}), 3, ""),
        (quota({"pods": "3"}), 4, "small allows pods=3 and 0 are used, but 4 pods need 4"),
        (
            quota({"pods": "3"}, {"pods": "2"}),
            2,
            "small allows pods=3 and 2 are used, but 2 pods need 2",
        ),
        (
            quota({"count/pods": "1"}, {"count/pods": "1"}),
            1,
            "count/pods=1 and 1 are used, but 1 pod need",
        ),
        (quota({"requests.cpu": "4"}), 2, ""),
        (quota({"requests.cpu": "4"}), 3, "requests.cpu=4 and 0 are used, but 3 pods need 6"),
        (
            quota({"cpu": "4500m"}, {"cpu": "600m"}),
            2,
            "cpu=4500m and 600m are used, but 2 pods need 4",
        ),
        (quota({"limits.memory": "2Gi"}), 3, "limits.memory=2Gi"),
        (quota({"requests.nvidia.com/gpu": "0"}), 3, ""),
        (quota({"pods": "0"}, scopes=["Terminating"]), 3, ""),
        (quota({"secrets": "0"}), 3, ""),
    ],
)
def test_pods_fit_into_quotas_or_the_first_key_says_why_not(
    quota: dict[str, Any], count: int, told: str
) -> None:
    reason = quotas.why_not_fitting([quota], [(NODE, count)])
    assert told in reason
    assert bool(reason) is bool(told)


@pytest.mark.parametrize(
    ("spec", "cpu"),
    [
        ({"containers": [container(cpu="1"), container(cpu="500m")]}, "1.5"),
        ({"containers": [container(cpu="1")], "initContainers": [container(cpu="3")]}, "3"),
        (
            {
                "containers": [container(cpu="1")],
                "initContainers": [
                    container(cpu="2") | {"restartPolicy": "Always"},
                    container(cpu="4"),
                ],
            },
            "6",
        ),
        ({"containers": [container(cpu="1")], "overhead": {"cpu": "250m"}}, "1.25"),
        ({"containers": [container(cpu="1")], "resources": {"requests": {"cpu": "5"}}}, "5"),
    ],
    ids=[
        "two containers",
        "an init container",
        "beside a sidecar",
        "overhead",
        "the pod as a whole",
    ],
)
def test_a_pod_counts_as_the_server_counts_it(spec: dict[str, Any], cpu: str) -> None:
    assert quotas.usage({"spec": spec})["requests.cpu"] == Decimal(cpu)


# -- machines --------------------------------------------------------------------------------------


def machine(
    name: str, *, ready: str = "True", labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {"conditions": conditions},
    }


GPU = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
CORDONED = machine("a", unschedulable=True)


@pytest.mark.parametrize(
    ("spec", "machines", "told"),
    [
        ({}, [machine("a")], ""),
        ({}, [CORDONED], "a is cordoned"),
        ({}, [CORDONED, machine("b")], ""),
        ({}, [CORDONED, machine("b", ready="Unknown")], "a is cordoned, b is not ready"),
        ({}, [CORDONED, machine("b", taints=[GPU])], "a is cordoned"),
        ({"tolerations": [{"operator": "Exists"}]}, [CORDONED], ""),
        (
            {"tolerations": [{"key": "gpu", "value": "yes"}]},
            [CORDONED, machine("b", taints=[GPU])],
            "",
        ),
        (
            {"tolerations": [{"key": "gpu", "value": "no"}]},
            [CORDONED, machine("b", taints=[GPU])],
            "a is cordoned",
        ),
        ({"nodeSelector": {"zone": "1"}}, [CORDONED, machine("b", labels={"zone": "1"})], ""),
        (
            {"nodeSelector": {"zone": "1"}},
            [machine("a"), machine("b", labels={"zone": "1"}, unschedulable=True)],
            "b",
        ),
        ({"nodeSelector": {"zone": "2"}}, [CORDONED, machine("b")], ""),
        ({}, [], ""),
    ],
)
def test_pods_have_a_place_unless_every_machine_for_them_is_closed(
    spec: dict[str, Any], machines: list[dict[str, Any]], told: str
) -> None:
    """A missing machine may be made for a pod; a cordoned machine takes none."""
    reason = pod_placement.why_nowhere({"spec": spec}, machines)
    assert told in reason
    assert bool(reason) is bool(told)


def test_a_pod_that_is_bound_to_named_machines_has_no_place_on_others() -> None:
    manifest: dict[str, Any] = {"spec": {}}
    pod_placement.only_on(manifest, ["a"])
    assert pod_placement.why_nowhere(manifest, [CORDONED, machine("b")]) == "a is cordoned"
    assert (
        pod_placement.why_nowhere(manifest, [machine("a"), machine("b", unschedulable=True)]) == ""
    )


def sized(name: str, **allocatable: str) -> dict[str, Any]:
    return {
        **machine(name),
        "status": {"conditions": [], "allocatable": {"cpu": "4", "memory": "8Gi", **allocatable}},
    }


DEVICES = {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("requests", "machines", "told"),
    [
        ({"cpu": "4"}, [sized("a")], ""),
        ({"cpu": "4500m"}, [sized("a")], "no machine has cpu=4.5; the largest has cpu=4"),
        ({"cpu": "5"}, [sized("a"), sized("b", cpu="8")], ""),
        (
            DEVICES,
            [sized("a"), sized("b")],
            "no machine has nvidia.com/gpu=2; the largest has nvidia.com/gpu=0",
        ),
        (DEVICES, [sized("a"), sized("b", **DEVICES)], ""),
        (
            {"memory": "9Gi", "cpu": "5"},
            [sized("a", cpu="8"), sized("b", memory="16Gi")],
            "all of memory=9Gi, cpu=5",
        ),
        ({"memory": "9Gi"}, [sized("a")], "no machine has memory=9Gi; the largest has memory=8Gi"),
        ({"cpu": "5"}, [], ""),
        ({}, [sized("a")], ""),
    ],
)
def test_pods_that_no_machine_is_large_enough_for_are_known(
    requests: dict[str, str], machines: list[dict[str, Any]], told: str
) -> None:
    reason = pod_placement.why_too_small(
        {"spec": {"containers": [container(**requests)]}}, machines
    )
    assert told in reason
    assert bool(reason) is bool(told)


def test_only_machines_on_which_a_pod_may_be_are_compared_with_its_requests() -> None:
    spec = {"containers": [container(cpu="5")], "nodeSelector": {"zone": "1"}}
    large = sized("b", cpu="8")
    assert (
        pod_placement.why_too_small({"spec": spec}, [large]) == ""
    )  # a cluster may make such a machine
    small = sized("a")
    small["metadata"]["labels"] = {"zone": "1"}
    assert "no machine has cpu=5" in pod_placement.why_too_small({"spec": spec}, [small, large])


def stranger(**metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "other", "name": "web", **metadata},
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize(
    ("node", "how", "pods", "told"),
    [
        (machine("a"), "cordon", [], ""),
        (CORDONED, "cordon", [], "a has a cordon already"),
        (CORDONED, "power-cut", [], ""),
        (
            machine("a", labels={PROTECTED: ""}),
            "power-cut",
            [],
            "it has the label chaoskit.dev/protect",
        ),
        (machine("a"), "power-cut", [stranger()], "others' pods run there (other/web)"),
        (machine("a"), "power-cut", [stranger(labels={SESSION: "chaoskit-1"})], ""),
        (machine("a"), "power-cut", [stranger(labels={SESSION: "chaoskit-2"})], "others' pods"),
        (machine("a"), "power-cut", [stranger(ownerReferences=[{"kind": "DaemonSet"}])], ""),
        (machine("a"), "power-cut", [stranger() | {"status": {"phase": "Succeeded"}}], ""),
    ],
)
def test_a_machine_may_be_broken_or_it_is_said_why_not(
    node: dict[str, Any], how: str, pods: list[dict[str, Any]], told: str
) -> None:
    reason = why_not_breakable(node, how, pods, "chaos", "chaoskit-1")
    assert told in reason
    assert bool(reason) is bool(told)


def test_no_pod_is_its_own_before_a_session_is_made() -> None:
    assert "other/web" in why_not_breakable(machine("a"), "", [stranger()], "chaos", "")


def test_a_machine_that_another_session_has_broken_is_left_alone() -> None:
    node = machine("a")
    node["metadata"]["annotations"] = {BROKEN: '{"session": "chaos/chaoskit-2", "how": "cordon"}'}
    assert "session chaos/chaoskit-2 has broken it" in why_not_breakable(
        node, "", [], "chaos", "chaoskit-1"
    )
    assert why_not_breakable(node, "", [], "chaos", "chaoskit-2") == ""


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "there", "absent"),
    [
        ({}, {"roles", "pods/portforward", "pods/eviction", "secrets"}, set()),
        (
            {"service_account": "chaoskit-driver"},
            {"pods/portforward", "secrets"},
            {"roles", "pods/eviction"},
        ),
        ({"harness": "here"}, {"pods/eviction", "secrets"}, {"roles", "pods/portforward"}),
    ],
)
def test_rights_depend_on_what_drives_runs(
    more: dict[str, str], there: set[str], absent: set[str]
) -> None:
    options = KubernetesOptions(**{"image": "a:1", "harness": "pod", **more})  # type: ignore[arg-type]
    resources = {right.resource for right in rights.of_session(options)}
    assert there <= resources
    assert not absent & resources


def test_missing_rights_are_one_line_with_the_reason_of_the_first() -> None:
    (roles,) = [right for right in rights.ACCOUNT_RIGHTS if right.resource == "roles"]
    (events,) = [right for right in rights.DRIVER_RIGHTS if right.resource == "events"]
    refusal = refusal_of_rights("rights", [(roles, "create"), (events, "list")], "chaos")
    assert str(refusal).startswith(
        "rights='create roles, list events': have them granted in the namespace chaos"
    )
    assert roles.why in str(refusal)
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("resource", "names_account"), [("serviceaccounts", True), ("roles", True), ("jobs", False)]
)
def test_a_user_that_may_make_no_account_is_told_of_the_installed_one(
    resource: str, names_account: bool
) -> None:
    (right,) = [right for right in rights.of_session(OPTIONS) if right.resource == resource]
    refusal = refusal_of_rights("rights", [(right, "create")], "chaos")
    assert ("CHAOSKIT_KUBERNETES_SERVICE_ACCOUNT=chaoskit-driver" in str(refusal)) is names_account


@pytest.mark.parametrize(
    ("message", "is_of_rights"),
    [
        (
            'pods is forbidden: User "system:serviceaccount:chaos:chaoskit-driver" cannot create resource "pods"',
            True,
        ),
        ('pods "x" is forbidden: User "ann" cannot get resource "pods/log" in API group ""', True),
        (
            'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2',
            False,
        ),
        (
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes',
            False,
        ),
        ('pods "x" not found', False),
    ],
)
def test_a_request_for_want_of_a_right_is_answered_with_the_remedy(
    message: str, is_of_rights: bool
) -> None:
    """Rights of a driver's account cannot be asked for before: only the account itself may ask."""
    message_with_remedy = rights.with_remedy(message)
    assert message_with_remedy.startswith(message)
    assert ("chaoskit cluster manifests" in message_with_remedy) is is_of_rights
    assert is_of_rights or message_with_remedy == message


def test_each_kind_of_object_is_checked_before_one_is_made() -> None:
    """The account of a driver is made with it, so a pod cannot be checked with that name before."""
    objects = session_objects("chaoskit-1", OPTIONS, {}, "chaos")
    kinds = [manifest["kind"] for manifest in objects]
    assert sorted(set(kinds)) == ["Job", "NetworkPolicy", "Pod", "Role", "Secret", "ServiceAccount"]
    assert kinds.count("Pod") == 3
    driver, coordinator, node = session_pods("chaoskit-1", OPTIONS, {})
    assert "serviceAccountName" not in driver["spec"]
    named = KubernetesOptions(image="a:1", harness="pod", service_account="mine", machines="b,c")
    driver, coordinator, node = session_pods("chaoskit-1", named, {})
    assert driver["spec"]["serviceAccountName"] == "mine"
    assert (
        pod_placement.why_nowhere(node, [machine("b", unschedulable=True), machine("d")])
        == "b is cordoned"
    )
    assert (
        pod_placement.why_nowhere(coordinator, [machine("b", unschedulable=True), machine("d")])
        == ""
    )
    here = session_objects(
        "chaoskit-1", KubernetesOptions(image="a:1", harness="here"), {}, "chaos"
    )
    assert [manifest["kind"] for manifest in here] == [
        "Pod",
        "Pod",
        "Job",
        "Secret",
        "NetworkPolicy",
    ]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2',
            "quota",
        ),
        ('pods "x" is forbidden: failed quota: q: must specify requests.cpu for: node', "template"),
        (
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes',
            "namespace",
        ),
        (
            'pods "x" is forbidden: error looking up service account chaos/y: not found',
            "service_account",
        ),
        ('admission webhook "policy.example" denied the request: no such registry', "template"),
        ('namespaces "chaos" not found', "namespace"),
        ('Pod "x" is invalid: spec.containers[0].image: Required value', "image"),
    ],
)
def test_a_refusal_names_the_field_that_has_to_change(message: str, field: str) -> None:
    refusal = refusal_of(message, OPTIONS, "chaos")
    assert refusal.field == field
    assert message in refusal.remedy


@pytest.mark.parametrize(
    "message",
    [
        'Pod "x-driver" is invalid: spec.containers[0].resources.requests: Invalid value: "512Mi": must be less than',
        'pods "x-driver" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi',
        'pods "x-node0" is forbidden: minimum cpu usage per Pod is 1, but no request is specified',
        'pods "x-node0" is forbidden: cpu max limit to request ratio per Pod is 2, but provided ratio is 4.0',
    ],
)
def test_a_refusal_of_resources_names_the_containers_that_a_template_sets(message: str) -> None:
    refusal = refusal_of(message, OPTIONS, "chaos")
    assert refusal.field == "template"
    assert "resources of its container node, driver or coordinator" in refusal.remedy
    assert "LimitRange" in refusal.remedy


def test_the_first_thing_that_is_missing_is_the_one_shown() -> None:
    findings = [
        ClusterFinding("a", "is there"),
        *(ClusterFinding(name, "", BadInput(name, 1, "")) for name in "bc"),
    ]
    with pytest.raises(BadInput, match="b=1"):
        require_all(findings)
    require_all(findings[:1])


def test_what_no_cluster_can_do_is_refused_without_asking_one() -> None:
    with pytest.raises(BadInput, match="device='cuda': use 'cpu'"):
        require_possible(RunDemand(2, device="cuda"))
    require_possible(RunDemand(2, command=("python", "train.py")))


MOUNTED = {
    "spec": {
        "containers": [
            {"name": "node", "volumeMounts": [{"name": "all", "mountPath": "/checkpoints"}]}
        ]
    }
}


@pytest.mark.parametrize(
    ("shared", "pod_template", "field", "remedy"),
    [
        ("", MOUNTED, "command", "CHAOSKIT_KUBERNETES_SHARED"),
        ("/elsewhere", MOUNTED, "shared", "mounts a volume"),
        ("/checkpoints", {}, "shared", "mounts a volume"),
        ("checkpoints", MOUNTED, "shared", "mounts a volume"),
    ],
)
def test_nodes_without_a_shared_directory_are_refused_without_asking_a_cluster(
    shared: str, pod_template: dict[str, Any], field: str, remedy: str
) -> None:
    """A command on several nodes that names {run_dir} needs a directory that they share."""
    preflight = Preflight(KubernetesOptions(image="registry/train:1", shared=shared), pod_template)
    with pytest.raises(BadInput, match=remedy) as refused:
        preflight.require_run(RunDemand(2, command=("train", "--out={run_dir}")), "")
    assert refused.value.field == field


def test_a_directory_below_a_mounted_volume_is_shared() -> None:
    require_mounted(MOUNTED, "/checkpoints/here")


# -- once ------------------------------------------------------------------------------------------


def attempt(refusal: FirstRefusal, error: Exception | None, size: int = 0) -> bool:
    """Try an action that fails with this error. Return whether it was tried."""
    is_tried = False
    with contextlib.suppress(BadInput, HarnessError), refusal.remembered(size):
        is_tried = True
        if error is not None:
            raise error
    return is_tried


@pytest.mark.parametrize(
    ("error", "is_tried_again"),
    [
        (BadInput("namespace", "x", "create it"), False),
        (PodsBarred("pods do not run after 120 s: node0: Unschedulable"), False),
        (HarnessError("pods do not run after 120 s: no supervisor has connected"), True),
        (ApiError("forbidden", 403), False),
        (ApiError("the API server does not answer"), True),
        (ApiError("overloaded", 429), True),
        (ApiError("being replaced", 503), True),
    ],
    ids=str,
)
def test_a_cluster_that_refuses_is_asked_once(error: Exception, is_tried_again: bool) -> None:
    refusal = FirstRefusal()
    assert attempt(refusal, error)
    assert attempt(refusal, error) is is_tried_again
    with pytest.raises(type(error), match=str(error)[:9]), refusal.remembered():
        raise error


def test_a_cluster_that_took_a_session_once_is_asked_again() -> None:
    """The session is asked for again, for example after its driver was lost: the obstacle may have
    gone.
    """
    refusal = FirstRefusal()
    assert attempt(refusal, None)
    refusal.note_success()
    assert attempt(refusal, PodsBarred("pods do not run"))
    assert attempt(refusal, None)


def test_a_smaller_run_is_tried_after_one_that_had_no_room() -> None:
    refusal = FirstRefusal()
    assert attempt(refusal, PodsBarred("node3: Unschedulable"), size=4)
    assert not attempt(refusal, None, size=5)
    assert attempt(refusal, None, size=2)


# -- a server that does not answer -----------------------------------------------------------------


@pytest.fixture
def silent(tmp_path: Path) -> str:
    """Return a kubeconfig that names a port of this machine on which no server listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return kubeconfig(tmp_path, closed.getsockname()[1])


def of_session(api: KubernetesApi) -> None:
    list(Examination(api, OPTIONS, {}).of_session())


def of_machines(api: KubernetesApi) -> None:
    options = KubernetesOptions(image="a:1", machines="node1", harness="pod")
    examination = Examination(api, options, {})
    list(examination.of_run(RunDemand(1, actions=frozenset({MachineDrain})), "chaoskit-1"))


@pytest.mark.parametrize("question", [require_allowed, of_session, of_machines])
def test_a_question_that_was_not_answered_is_neither_bad_input_nor_remembered(
    silent: str, question: Callable[[KubernetesApi], None]
) -> None:
    refusal, api = FirstRefusal(), KubernetesApi(kubeconfig=silent)
    for _ in range(2):
        with pytest.raises(ApiError, match="does not answer"), refusal.remembered():
            question(api)
    assert attempt(refusal, None)


def test_a_machine_that_is_not_answered_for_is_no_bad_input(tmp_path: Path) -> None:
    """The rights are answered, and then the server is overloaded or gone.

    A machine that may not be read is bad input.
    """
    node_answers: dict[str, tuple[int, Any]] = {"node": (501, {})}

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST":
            return 201, {"status": {"allowed": True}}
        return (200, {"items": []}) if path.endswith("/pods") else node_answers["node"]

    with (
        api_server(tmp_path, answer) as server,
        contextlib.closing(KubernetesApi(kubeconfig=server.kubeconfig)) as api,
    ):
        with pytest.raises(ApiError, match="501"):
            of_machines(api)
        node_answers["node"] = refusal(403, "nodes is forbidden")
        options = KubernetesOptions(image="a:1", machines="node1", harness="pod")
        demand = RunDemand(0, actions=frozenset({MachineDrain}))
        *_, finding = Examination(api, options, {}).of_run(demand, "chaoskit-1")
        assert finding.refusal is not None
        assert finding.refusal.field == "machines"


def test_a_session_is_asked_for_again_once_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt meets no server, the second a server that refuses: only the refusal is
    remembered.
    """
    preflight = Preflight(OPTIONS, {})
    with api_server(tmp_path, lambda *request: refusal(403, "namespaces is forbidden")) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
    with pytest.raises(ApiError, match="does not answer"):
        preflight.require_session()
    with api_server(tmp_path, lambda *request: refusal(403, "namespaces is forbidden")) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        with pytest.raises(
            BadInput, match="use a cluster that grants you access: namespaces is forbidden"
        ):
            preflight.require_session()
        count = len(server.requests)
        with pytest.raises(BadInput, match="use a cluster that grants you access"):
            preflight.require_session()
        assert len(server.requests) == count


def test_a_server_that_stops_answering_is_the_last_finding_of_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is answered, the namespace is not: no right and no namespace is called
    missing.
    """

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (200, {"gitVersion": "v1.36.3"}) if path == "/version" else (501, {})

    with api_server(tmp_path, answer) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        findings = list(examine_cluster(KubernetesOptions(image="a:1", harness="pod")))
    assert [(finding.name, finding.is_there) for finding in findings] == [
        ("options", True),
        ("API server", True),
        ("API server", False),
    ]


# -- the right to write Events ---------------------------------------------------------------------


def allowing(*, events: bool) -> Callable[[str, str, Any], tuple[int, Any]]:
    """Return a server that lets a user do all, except writing Events unless ``events``."""

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/selfsubjectaccessreviews"):
            attributes = body["spec"]["resourceAttributes"]
            return 201, {
                "status": {
                    "allowed": events
                    or (attributes["resource"], attributes["verb"]) != ("events", "create")
                }
            }
        if path.endswith("/namespaces/chaos"):
            return 200, {"metadata": {"labels": {ALLOWED: ALLOWED_VALUE}}}
        return 201, body

    return answer


@pytest.mark.parametrize("is_allowed", [True, False])
def test_without_the_right_to_write_events_a_session_is_made_all_the_same(
    tmp_path: Path, is_allowed: bool
) -> None:
    """A single line names the missing right; the role of the session's driver has only rights that
    the user can grant.
    """
    with api_server(tmp_path, allowing(events=is_allowed)) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        findings = list(Examination(api, OPTIONS, {}).of_session())
        api.close()
    require_all(findings)
    (finding,) = [its_finding for its_finding in findings if its_finding.name == "events"]
    assert finding.is_limited is not is_allowed
    assert (
        "the right to create events is missing: kubectl get events shows no faults" in finding.text
    ) is not is_allowed
    assert "\n" not in finding.text
    (role,) = [
        body for _, _, body in server.requests if body is not None and body["kind"] == "Role"
    ]
    verbs = {
        verb for rule in role["rules"] if rule["resources"] == ["events"] for verb in rule["verbs"]
    }
    assert verbs == ({"list", "create"} if is_allowed else {"list"})


def test_an_account_that_an_administrator_has_made_is_not_asked_for_its_right_to_events(
    tmp_path: Path,
) -> None:
    options = KubernetesOptions(image="a:1", harness="pod", service_account="chaoskit-driver")
    with api_server(tmp_path, allowing(events=False)) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        names = [finding.name for finding in Examination(api, options, {}).of_session()]
        api.close()
    assert "events" not in names


@pytest.mark.parametrize("is_large", [True, False])
def test_machines_that_are_too_small_limit_a_run_and_refuse_none(
    tmp_path: Path, is_large: bool
) -> None:
    """A cluster may make such a machine when a pod waits for it."""
    place = sized("a") if is_large else sized("a", cpu="10m")
    place["status"]["conditions"] = [{"type": "Ready", "status": "True"}]

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST":  # a dry run of a pod
            return 201, body
        return 200, {"items": [place] if path == "/api/v1/nodes" else [], "metadata": {}}

    with api_server(tmp_path, answer) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        (places,) = [
            finding
            for finding in Examination(api, OPTIONS, {}).of_run(RunDemand(nodes=2))
            if finding.name == "places"
        ]
        api.close()
    assert places.is_there
    assert places.is_limited is not is_large
