"""The objects of a session, the parts that a template may change, and reasons why pods do not run.

Asks no cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate import registry
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.diagnosis import not_running
from chaoskit.substrate.kubernetes.pods.pod_placement import is_ready
from chaoskit.substrate.kubernetes.pods.state import (
    Pending,
    in_words,
    pending,
    pull_failure,
    why_not_preempting,
)

OPTIONS = KubernetesOptions(image="registry/train:1")
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "chaoskit-1", "uid": "a-b-c"}


def pod(given: dict[str, Any] | None = None) -> dict[str, Any]:
    return manifests.pod(
        "chaoskit-1", "node0", "chaoskit-1-node0-1", "10.0.0.1:7000", OPTIONS, given or {}, OWNER
    )


# -- pods ------------------------------------------------------------------------------------------


def test_a_pod_is_hardened() -> None:
    """The pod meets the Pod Security level `restricted`, with a read-only root file system."""
    spec = pod()["spec"]
    (node,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert node["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["automountServiceAccountToken"]
    assert not any(mount["mountPath"] == "/" for mount in node["volumeMounts"])


def test_the_token_is_in_no_command_and_no_variable() -> None:
    secret = manifests.secret("chaoskit-1", "the token", OWNER)
    assert "the token" not in json.dumps([secret["metadata"], pod()])
    assert {
        "name": "chaoskit-token",
        "secret": {"secretName": "chaoskit-1", "defaultMode": 0o440},
    } in pod()["spec"]["volumes"]


@pytest.mark.parametrize(
    "made",
    [
        pod(),
        manifests.secret("chaoskit-1", "", OWNER),
        manifests.network_policy("chaoskit-1", "10.0.0.1", OWNER),
    ],
    ids=lambda made: made["kind"],
)
def test_everything_belongs_to_the_job(made: dict[str, Any]) -> None:
    """An object goes with the Job, and can be found by the session's label."""
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert made["metadata"]["labels"][manifests.SESSION] == "chaoskit-1"


def test_pods_of_a_world_have_labels_that_the_server_takes() -> None:
    labels = manifests.world_labels("001-a test[é-0]" + "x" * 80, [3, 0], 7)
    assert labels[manifests.RANKS] == "0_3"
    assert labels[manifests.GENERATION] == "7"
    assert labels[manifests.RUN] == "001-a-test---0-" + "x" * 48
    assert manifests.world_labels("001-a[0]", [0], 1)[manifests.RUN] == "001-a-0"
    assert manifests.world_labels("001-a", [], 2)[manifests.RANKS] is None, (
        "a pod whose rank went elsewhere"
    )


def test_annotations_of_a_pod_say_what_does_not_fit_a_label() -> None:
    ranks, test = range(64), "tests/test_a.py::test_b[a b/c]"
    notes = manifests.world_annotations("001-a test[é-0]" + "x" * 80, test, ranks, 7)
    assert notes[manifests.RUN] == "001-a test[é-0]" + "x" * 80
    assert notes[manifests.TEST] == test
    assert notes[manifests.RANKS] == ",".join(map(str, ranks))
    assert notes[manifests.GENERATION] == "7"
    assert notes.keys() > manifests.world_labels("001-a", [0], 7).keys()
    idle = manifests.world_annotations("001-a", "", [], 8)
    assert (idle[manifests.TEST], idle[manifests.RANKS]) == (None, None), (
        "of an earlier test, and of a rank elsewhere"
    )


def test_a_pod_that_stood_by_says_what_it_has_become() -> None:
    coordinator, node = manifests.station_labels("coordinator"), manifests.station_labels("node1")
    assert coordinator == {
        manifests.STATION: "coordinator",
        "app.kubernetes.io/component": "coordinator",
    }
    assert node == {manifests.STATION: "node1", "app.kubernetes.io/component": "node"}


def test_the_job_ends_by_itself() -> None:
    """The job ends whatever becomes of the process that made it.

    A deadline does not count while a job is suspended.
    """
    job = manifests.job("chaoskit-1", pod(), started_by="me@here", deadline_s=60)
    assert "suspend" not in job["spec"]
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 60
    assert job["spec"]["ttlSecondsAfterFinished"] == manifests.TTL_S
    assert job["spec"]["template"]["spec"] == pod()["spec"]


# -- the driver's pod ------------------------------------------------------------------------------


def driver(given: dict[str, Any] | None = None, **more: str) -> dict[str, Any]:
    options = KubernetesOptions(image="registry/train:1", startup_s=30.0, **more)
    return manifests.driver("chaoskit-1", options, given or {})


def test_a_driver_has_a_role_for_pods_and_no_more() -> None:
    """The role never allows to run commands in pods, and no pod but the driver's has it."""
    account, role, binding = manifests.driver_rights("chaoskit-1", "chaos", OWNER)
    verbs = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {resource for resource, _ in verbs} == {"pods", "pods/eviction", "pods/log", "events"}
    assert ("pods/log", "create") not in verbs
    assert {verb for resource, verb in verbs if resource == "events"} == {"list", "create"}
    _, lesser, _ = manifests.driver_rights("chaoskit-1", "chaos", OWNER, writes_events=False)
    assert [rule for rule in role["rules"] if rule not in lesser["rules"]] == role["rules"][-1:], (
        "of Events alone"
    )
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "chaos"}
    ]
    assert (driver()["spec"]["serviceAccountName"], pod()["spec"].get("serviceAccountName")) == (
        "chaoskit-1",
        None,
    )
    assert driver(service_account="mine")["spec"]["serviceAccountName"] == "mine"


def test_a_driver_finds_the_same_options_and_its_session() -> None:
    pod_template = {
        "spec": {"containers": [{"name": "node", "env": [{"name": "MINE", "value": "1"}]}]}
    }
    (container,) = driver(pod_template, template="here.yaml")["spec"]["containers"]
    environment = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    options_there = KubernetesOptions.from_environment(environment)
    assert (options_there.image, options_there.startup_s, options_there.harness) == (
        "registry/train:1",
        30.0,
        "here",
    )
    assert options_there.driven is not None
    assert options_there.driven.name == "chaoskit-1"
    assert options_there.template.startswith(options_there.driven.directory)
    assert environment["MINE"] == "1"
    assert {f"{VARIABLE}ADDRESS"} <= {
        variable["name"] for variable in container["env"] if "valueFrom" in variable
    }


#: Fields of the nodes of a run: a machine with GPUs for each, and a sidecar that uses a GPU, too.
LARGE: dict[str, Any] = {
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    "resources": {"limits": {"cpu": "64"}},
    "initContainers": [
        {
            "name": "exporter",
            "restartPolicy": "Always",
            "resources": {
                "limits": {"nvidia.com/gpu": "1", "memory": "8Gi"},
                "requests": {"cpu": "4"},
            },
        }
    ],
    "containers": [
        {
            "name": "node",
            "resources": {
                "claims": [{"name": "gpu"}],
                "limits": {"nvidia.com/gpu": "8", "memory": "256Gi", "hugepages-2Mi": "4Gi"},
                "requests": {"cpu": "32", "rdma/hca": "1"},
            },
        }
    ],
}
SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}}


def coordinator(given: dict[str, Any]) -> dict[str, Any]:
    return manifests.pod(
        "chaoskit-1", "coordinator", "chaoskit-1-c", "10.0.0.1:7000", OPTIONS, given, OWNER
    )


@pytest.mark.parametrize("made", [driver, coordinator])
def test_a_driver_and_a_coordinator_ask_for_little(
    made: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """The pods ask for no GPU, whatever the template asks for nodes: in a sidecar, the whole pod or
    claims of devices.
    """
    (plain,) = made({})["spec"]["containers"]
    assert plain["resources"] == SMALL
    spec = made({"spec": LARGE})["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {**SMALL, "limits": {"memory": "4Gi"}}
    (exporter,) = spec["initContainers"]
    assert exporter["resources"] == {
        "limits": {"memory": "8Gi"},
        "requests": {"cpu": "0", "memory": "0"},
    }
    assert not {"resourceClaims", "resources"} & set(spec)
    assert container["securityContext"] == pod()["spec"]["containers"][0]["securityContext"]


def test_a_node_and_a_pod_that_stands_by_ask_for_what_the_template_says() -> None:
    for station in ("node0", "standby0"):
        spec = manifests.pod(
            "chaoskit-1", station, "chaoskit-1-n", "10.0.0.1:7000", OPTIONS, {"spec": LARGE}
        )["spec"]
        assert {name: spec[name] for name in ("resourceClaims", "resources", "initContainers")} == {
            name: LARGE[name] for name in ("resourceClaims", "resources", "initContainers")
        }
        assert spec["containers"][0]["resources"] == LARGE["containers"][0]["resources"]


@pytest.mark.parametrize("made", [driver, coordinator])
def test_a_template_sets_what_driver_and_coordinator_ask_for(
    made: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    """The template names them in a container that becomes no container of a pod."""
    resources = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}, "claims": [{"name": "gpu"}]}
    more = [
        {"name": "driver", "resources": resources},
        {"name": "coordinator", "resources": resources},
    ]
    pod_template = template.read(
        write(tmp_path, {"spec": {**LARGE, "containers": [*LARGE["containers"], *more]}})
    )
    spec = made(pod_template)["spec"]
    assert [
        (its_container["name"], its_container["resources"]) for its_container in spec["containers"]
    ] == [("node", resources)]
    assert spec["resourceClaims"] == LARGE["resourceClaims"]
    (node,) = pod(pod_template)["spec"]["containers"]
    assert node["resources"] == LARGE["containers"][0]["resources"]


# -- a pod for which another one is preempted ------------------------------------------------------


def test_a_preemptor_asks_for_nothing_but_its_place() -> None:
    """The template does not change that: the scheduler could take other pods, too, or could not
    schedule it.
    """
    pod_template = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {
            "nodeName": "other",
            "schedulerName": "mine",
            "preemptionPolicy": "Never",
            "tolerations": [{"operator": "Exists"}],
            "resourceClaims": [{"name": "gpu"}],
            "containers": [
                {
                    "name": "node",
                    "ports": [{"containerPort": 80, "hostPort": 80}],
                    "resources": {"limits": {"cpu": "2"}},
                }
            ],
        },
    }
    preemptor = manifests.preemptor(pod(pod_template), "chaoskit-1-node0", "worker-7", "urgent")
    assert preemptor["metadata"]["labels"] == {
        name: pod()["metadata"]["labels"][name] for name in preemptor["metadata"]["labels"]
    }
    spec = preemptor["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert not {
        "nodeName",
        "schedulerName",
        "preemptionPolicy",
        "resourceClaims",
        "volumes",
        "initContainers",
    } & set(spec)
    (container,) = spec["containers"]
    assert set(container["resources"]["requests"].values()) == {"0"}
    assert "ports" not in container
    assert container["securityContext"] == pod()["spec"]["containers"][0]["securityContext"]
    (anti_affinity,) = spec["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert anti_affinity["labelSelector"]["matchLabels"] == {manifests.PLACE: "chaoskit-1-node0"}


VICTIM = {"spec": {"priority": 0}}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"priority": 1000}, ""),
        (
            {
                "priority": 1000,
                "containers": [{"resources": {"requests": {"cpu": "0", "memory": "0"}}}],
            },
            "",
        ),
        ({"priority": 0}, "priority would be 0"),
        ({}, "priority would be 0"),
        ({"priority": 1000, "preemptionPolicy": "Never"}, "preempts no pods"),
        (
            {"priority": 1000, "containers": [{"resources": {"requests": {"cpu": "500m"}}}]},
            "others' pods",
        ),
        (
            {"priority": 1000, "initContainers": [{"resources": {"requests": {"memory": "1Gi"}}}]},
            "others' pods",
        ),
        ({"priority": 1000, "overhead": {"memory": "120Mi"}}, "others' pods"),
    ],
)
def test_what_would_not_preempt_one_pod_alone_is_not_made(
    spec: dict[str, Any], reason: str
) -> None:
    """The pod is inspected as the server would have it: namespaces and webhooks add to it."""
    objection = why_not_preempting({"spec": spec}, VICTIM)
    assert reason in objection
    assert bool(objection) is bool(reason)


UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("status", "taints", "expected"),
    [
        ("True", [], True),
        ("True", [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], True),
        ("True", [UNREACHABLE], False),
        ("Unknown", [], False),
        ("False", [UNREACHABLE], False),
    ],
)
def test_a_machine_is_back_when_pods_may_go_there(
    status: str, taints: list[dict[str, str]], expected: bool
) -> None:
    """A machine is not back when its kubelet reports, some seconds earlier: new pods then go to the
    other machines.
    """
    node = {
        "status": {"conditions": [{"type": "Ready", "status": status}]},
        "spec": {"taints": taints},
    }
    assert is_ready(node) is expected


def failed(message: str, count: int = 1) -> dict[str, Any]:
    return {"message": message, "count": count}


NOT_PULLED = 'Failed to pull image "x:1":\n  connection refused'


def test_an_event_tells_early_that_an_image_is_not_pulled() -> None:
    failure = pull_failure("node1", [failed("Error: ErrImagePull"), failed(NOT_PULLED)])
    assert failure is not None
    assert str(failure) == 'node1: ErrImagePull (Failed to pull image "x:1": connection refused)'
    assert pull_failure("node1", [failed("Error: failed to create containerd task")]) is None


@pytest.mark.parametrize(
    ("events", "is_final"),
    [
        ([failed(NOT_PULLED)], False),
        ([failed(NOT_PULLED, 2)], True),
        ([failed(NOT_PULLED), failed(NOT_PULLED.replace("refused", "reset"))], True),
        ([{"message": NOT_PULLED, "count": None, "series": {"count": 2}}], True),
        ([failed("Error: ErrImagePull", 5), failed(NOT_PULLED)], False),
    ],
    ids=["once", "twice", "twice, for two reasons", "twice, in a series", "other events"],
)
def test_an_image_is_given_up_when_the_kubelet_has_backed_off_twice(
    events: list[dict[str, Any]], is_final: bool
) -> None:
    failure = pull_failure("node1", events)
    assert failure is not None
    assert failure.is_final is is_final


# -- templates -------------------------------------------------------------------------------------


def write(directory: Path, content: Any) -> str:
    path = directory / "template.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_template_adds_what_pods_do_not_have(tmp_path: Path) -> None:
    pod_template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "gpu"}],
            "securityContext": {"runAsUser": 2000},
            "containers": [
                {
                    "name": "node",
                    "image": "other:2",
                    "env": [{"name": "HOME", "value": "/home"}, {"name": "MORE", "value": "1"}],
                    "resources": {"limits": {"cpu": "2"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
            ],
            "initContainers": [{"name": "sidecar", "image": "side:1", "restartPolicy": "Always"}],
            "terminationGracePeriodSeconds": 7,
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    manifest = pod(template.read(write(tmp_path, pod_template)))
    (node,) = manifest["spec"]["containers"]
    assert node["image"] == "other:2"
    assert node["command"][0] == "python3"
    variables = {variable["name"]: variable.get("value") for variable in node["env"]}
    assert (variables["HOME"], variables["MORE"], variables["OMP_NUM_THREADS"]) == (
        "/home",
        "1",
        "1",
    )
    assert [mount["mountPath"] for mount in node["volumeMounts"]][-1] == "/data"
    assert len(node["volumeMounts"]) == len(pod()["spec"]["containers"][0]["volumeMounts"]) + 1
    assert manifest["spec"]["initContainers"] == pod_template["spec"]["initContainers"]
    assert node["command"][-2:] == ["--grace-s", "7"]
    job = manifests.job("chaoskit-1", manifest, started_by="me@here", deadline_s=60)
    assert job["spec"]["template"]["metadata"]["annotations"] == {"note": "b"}
    assert manifest["metadata"]["labels"]["team"] == "a"
    assert manifest["metadata"]["labels"][manifests.STATION] == "node0"
    assert manifest["spec"]["securityContext"]["runAsUser"] == 2000
    assert manifest["spec"]["securityContext"]["runAsNonRoot"]
    assert manifest["spec"]["tolerations"] == [{"key": "gpu"}]


def test_merging_changes_neither_side() -> None:
    base, addition = (
        {"a": {"b": 1}, "containers": [{"name": "x"}]},
        {"a": {"c": 2}, "containers": [{"name": "x", "y": 1}]},
    )
    before = json.dumps([base, addition])
    assert template.merge(base, addition) == {
        "a": {"b": 1, "c": 2},
        "containers": [{"name": "x", "y": 1}],
    }
    assert json.dumps([base, addition]) == before


def test_a_variable_of_a_template_is_taken_whole() -> None:
    """The variable has a value or a source of it, and not both."""
    source = {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    manifest = pod({"spec": {"containers": [{"name": "node", "env": [source]}]}})
    assert source in manifest["spec"]["containers"][0]["env"]


@pytest.mark.parametrize("kind", ["Pod", "a template", "PodTemplate", "Deployment"])
def test_forms_of_a_template(tmp_path: Path, kind: str) -> None:
    inner = {"spec": {"nodeSelector": {"a": "b"}}}
    forms = {
        "Pod": {"kind": "Pod", **inner},
        "PodTemplate": {"kind": "PodTemplate", "template": inner},
        "Deployment": {"kind": "Deployment", "spec": {"template": inner, "replicas": 3}},
    }
    assert template.read(write(tmp_path, forms.get(kind, inner)))["spec"] == inner["spec"]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"metadata": {"name": "x"}, "spec": {}}, "metadata.name"),
        ({"metadata": {"ownerReferences": []}, "spec": {}}, "metadata.ownerReferences"),
        (
            {"metadata": {"labels": {"chaoskit.dev/session": "x"}}, "spec": {}},
            "metadata.labels[chaoskit.dev/session]",
        ),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
        ({"spec": {"hostPID": True}}, "spec.hostPID"),
        ({"spec": {"shareProcessNamespace": True}}, "spec.shareProcessNamespace"),
        (
            {"spec": {"containers": [{"name": "node", "command": ["sh"]}]}},
            "spec.containers[node].command",
        ),
        ({"spec": {"containers": [{"name": "node", "args": []}]}}, "spec.containers[node].args"),
        ({"spec": {"volumes": [{"name": "chaoskit-token"}]}}, "spec.volumes[chaoskit-token]"),
        (
            {"spec": {"containers": [{"name": "side"}]}},
            "spec.containers[side] (make it an init container",
        ),
        (
            {"spec": {"containers": [{"name": "driver", "image": "x"}]}},
            "spec.containers[driver].image",
        ),
        (
            {"spec": {"containers": [{"name": "coordinator", "env": []}]}},
            "spec.containers[coordinator].env",
        ),
    ],
)
def test_what_is_the_sessions_is_refused_by_its_path(
    tmp_path: Path, given: dict[str, Any], path: str
) -> None:
    with pytest.raises(BadInput) as refused:
        template.read(write(tmp_path, given))
    assert f"remove {path}" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [",
        "[]",
        "metadata: {}",
        "spec: 3",
        "spec: {containers: 3}",
        "\x00",
        "spec: {}\n---\nspec: {}",
        "spec: {containers: [{name: node, env: [A=b]}]}",
        "spec: {containers: [{name: node, env: null}]}",
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="template") as refused:
        template.read(write(tmp_path, text))
    assert "\n" not in str(refused.value)


# -- options ---------------------------------------------------------------------------------------


def test_options_come_from_the_environment() -> None:
    environment = {
        "CHAOSKIT_KUBERNETES_IMAGE": "a:1",
        "CHAOSKIT_KUBERNETES_STARTUP_S": "20",
        "OTHER": "x",
    }
    assert KubernetesOptions.from_environment(environment) == KubernetesOptions(
        image="a:1", startup_s=20.0
    )


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("CHAOSKIT_KUBERNETES_IMGAE", "a", "write CHAOSKIT_KUBERNETES_IMAGE$"),
        ("CHAOSKIT_KUBERNETES_NAMSPACE", "a", "write CHAOSKIT_KUBERNETES_NAMESPACE$"),
        ("CHAOSKIT_KUBERNETES_SERVICEACCOUNT", "a", "write CHAOSKIT_KUBERNETES_SERVICE_ACCOUNT$"),
        (
            "CHAOSKIT_KUBERNETES_QUOTA",
            "a",
            "unset it, or use one of CHAOSKIT_KUBERNETES_IMAGE, .*_OWN_MACHINE$",
        ),
        ("CHAOSKIT_KUBERNETES_STARTUP_S", "soon", "float"),
    ],
)
def test_a_variable_that_is_no_option_is_refused(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=remedy) as refused:
        KubernetesOptions.from_environment({variable: value})
    assert variable in str(refused.value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (KubernetesOptions(), "CHAOSKIT_KUBERNETES_IMAGE"),
        (KubernetesOptions(template="/not/there.yaml"), "template"),
        (KubernetesOptions(image="a", startup_s=0.0), "startup_s"),
        (KubernetesOptions(image="a", startup_s=float("inf")), "startup_s"),
        (KubernetesOptions(image="a", address="localhost"), "address"),
        (KubernetesOptions(image="a", address="::1"), "address"),
    ],
)
def test_options_without_which_no_pod_can_be_made(options: KubernetesOptions, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        options.require()


def test_a_substrate_without_an_image_is_unavailable_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("IMAGE", "TEMPLATE"):
        monkeypatch.delenv(f"CHAOSKIT_KUBERNETES_{name}", raising=False)
    assert "CHAOSKIT_KUBERNETES_IMAGE" in registry.unavailable("kubernetes")


def test_neither_chaoskit_nor_a_supervisor_loads_the_client() -> None:
    """The client takes a second and 70 MB."""
    code = (
        "import sys, chaoskit, chaoskit.substrate.supervisor.server, chaoskit.agent.agent, chaoskit.substrate.registry;"
        "import chaoskit.substrate.kubernetes.substrate;"
        "sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- why a pod does not run ------------------------------------------------------------------------


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {
        "status": {
            "phase": "Pending",
            "containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}],
        }
    }


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, None),
        ({"status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}}, None),
        (waiting("ContainerCreating"), None),
        (waiting("ErrImagePull", "no\nsuch  image"), Pending("n", "ErrImagePull", "no such image")),
        (
            waiting("CreateContainerConfigError", "x"),
            Pending("n", "CreateContainerConfigError", "x"),
        ),
        (waiting("InvalidImageName", "x"), Pending("n", "InvalidImageName", "x", is_final=True)),
        (
            {
                "status": {
                    "conditions": [
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/3",
                        }
                    ]
                }
            },
            Pending("n", "Unschedulable", "0/3"),
        ),
        (
            {
                "status": {
                    "phase": "Failed",
                    "containerStatuses": [
                        {"state": {"terminated": {"reason": "Error", "exitCode": 1}}}
                    ],
                }
            },
            Pending("n", "Error", "exit code 1", is_final=True),
        ),
        (
            {"status": {"phase": "Failed", "reason": "Evicted", "message": "low"}},
            Pending("n", "ended by its machine", "Evicted, low", is_final=True, is_passing=True),
        ),
        (
            {
                "metadata": {"deletionTimestamp": "2026-08-01T12:00:30Z"},
                "status": {"phase": "Pending"},
            },
            Pending(
                "n",
                "deleted",
                "deletionTimestamp 2026-08-01T12:00:30Z",
                is_final=True,
                is_passing=True,
            ),
        ),
    ],
)
def test_why_a_pod_does_not_run(found: dict[str, Any], told: Pending | None) -> None:
    assert pending("n", found) == told


def test_pods_that_wait_for_the_same_reason_are_named_together() -> None:
    reasons = [
        Pending("node0", "Unschedulable", "0/3"),
        Pending("driver", "Error"),
        Pending("node1", "Unschedulable", "0/3"),
    ]
    assert in_words(reasons) == "node0, node1: Unschedulable (0/3); driver: Error"


NO_MODULE = (
    "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named '{}'"
)


@pytest.mark.parametrize("module", ["chaoskit", "msgspec", "kubernetes.client"])
@pytest.mark.parametrize("image", ["registry/train:1", ""])
def test_an_image_without_a_module_is_bad_input(module: str, image: str) -> None:
    options = KubernetesOptions(image=image, template="pod.yaml", python="/opt/python")
    ended = Pending("driver", "Error", "exit code 1", is_final=True)
    error = not_running([ended], [NO_MODULE.format(module)], options, "")
    assert isinstance(error, BadInput)
    assert error.field == ("image" if image else "template")
    assert "\n" not in str(error)
    assert f"its /opt/python has no {module.partition('.')[0]}" in str(error)
    assert f"{VARIABLE}PYTHON" in str(error)


@pytest.mark.parametrize(
    ("pending", "log"),
    [
        (Pending("node0", "Unschedulable", "0/3 Insufficient cpu"), NO_MODULE.format("torch")),
        (Pending("node0", "Error", "exit code 1", is_final=True), NO_MODULE.format("triton")),
        (
            Pending("node0", "Error", "exit code 1", is_final=True),
            "going without it: No module named 'torch'",
        ),
    ],
)
def test_a_module_that_is_not_the_reason_is_not_blamed(pending: Pending, log: str) -> None:
    error = not_running([pending], [log], OPTIONS, "")
    assert pending.message in str(error)
    assert "PYTHON to its interpreter" not in str(error)
    assert not isinstance(error, BadInput)


@pytest.mark.parametrize(
    "message",
    [
        'exec: "python9": executable file not found in $PATH',
        'exec: "/no": stat /no: no such file or directory',
    ],
)
def test_an_image_without_the_python_that_was_named_is_bad_input(message: str) -> None:
    error = not_running([Pending("driver", "StartError", message, is_final=True)], [], OPTIONS, "")
    assert isinstance(error, BadInput)
    assert error.field == "python"
    assert message in str(error)


def test_a_container_that_cannot_start_for_another_reason_is_an_error() -> None:
    mount = Pending("driver", "StartError", "mount /data: no such file or directory", is_final=True)
    error = not_running([mount], [], OPTIONS, "")
    assert isinstance(error, HarnessError)
    assert str(error) == f"pods do not run: {mount}"


def test_pods_that_find_no_machine_in_time_are_told_with_both_remedies() -> None:
    reasons = [
        Pending(station, "Unschedulable", "0/3 Insufficient nvidia.com/gpu")
        for station in ("node0", "node1")
    ]
    message = str(not_running(reasons, [], OPTIONS, ""))
    assert message.startswith(
        "pods do not run after 120 s: node0, node1: Unschedulable (0/3 Insufficient nvidia.com/gpu)"
    )
    assert "request less in the template" in message
    assert f"{VARIABLE}STARTUP_S" in message


def test_what_a_pod_has_printed_is_shown_once() -> None:
    log = "one\n  two"
    ended = Pending("driver", "Error", "exit code 1: one two", is_final=True)
    assert str(not_running([ended], [log], OPTIONS, "")) == f"pods do not run: {ended}"
    assert (
        str(not_running([], [log], OPTIONS, "no pod came", is_late=False))
        == f"pods do not run: no pod came\n{log}"
    )
