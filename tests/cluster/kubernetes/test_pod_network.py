"""Tests of the network between real pods, which a helper in each pod breaks and measures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.goals import workers_lost
from support.nodes import pods

from chaoskit.errors import BadInput
from chaoskit.experiment.harness import Harness
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import HELPER
from chaoskit.substrate.kubernetes.substrate import KubernetesSubstrate
from chaoskit.suites.recovery.expect import AT, STEADY
from chaoskit.vocabulary import Event
from faults import Bandwidth, Cut, Delay, Fault, Kill, LinkDown, Loss, Reset

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
    pytest.mark.costly,
]


def substrate_of(options: KubernetesOptions) -> Iterator[KubernetesSubstrate]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
        made = KubernetesSubstrate(options)
        yield made
        made.close()


@pytest.fixture(scope="module")
def substrate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesSubstrate]:
    yield from substrate_of(pods.options(tmp_path_factory.mktemp("pods"), network_faults="allow"))


@pytest.fixture(scope="module")
def harness(substrate: KubernetesSubstrate, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(substrate, tmp_path_factory.mktemp("runs"))


def run(harness: Harness, *faults: Fault, **plan: Any) -> Outcome:
    settings: dict[str, Any] = {"nodes": 3, "spares": 0, "steps": 100, "deadline_s": 60.0} | plan
    return harness.run(STEADY, faults=faults, **settings)


@pytest.mark.slow
@pytest.mark.promise("**The network between pods is cut**")
def test_a_pod_that_is_cut_off_is_given_up(harness: Harness) -> None:
    """The cut is silent: the node's lease expires. Its supervisor stays reachable, and no step of
    the run is lost.
    """
    outcome = run(harness, Cut(rank=1, at_step=AT))
    assert outcome.verdict.value == "passed", outcome.reasons
    assert [record["node"] for record in outcome.records(Event.NODE_LOST)] == ["node1"]
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_a_pod_comes_back_when_its_network_does(harness: Harness) -> None:
    outcome = run(harness, Cut(rank=1, at_step=AT, heal_after_s=2.0), steps=300)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.steps[-1].world == 3
    assert len(outcome.records(Event.LIFTED)) == 1


@pytest.mark.parametrize("direction", ["in", "out"])
def test_one_way_is_cut(harness: Harness, direction: str) -> None:
    outcome = run(harness, Cut(rank=1, at_step=AT, apart_from="coordinator", direction=direction))
    assert outcome.verdict.value == "passed", outcome.reasons
    assert workers_lost(outcome)


@pytest.mark.parametrize(
    "fault",
    [
        Reset(rank=1, at_step=AT, apart_from=(0,), heal_after_s=1.0),
        Loss(rank=1, at_step=AT, share=0.1, heal_after_s=1.0),
        Delay(rank=1, at_step=AT, delay_ms=20.0, apart_from="ranks", heal_after_s=1.0),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_the_network_works_badly(harness: Harness, fault: Fault) -> None:
    outcome = run(harness, fault, steps=150)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == 0


def test_a_rank_dies_in_a_bad_network(harness: Harness) -> None:
    faults = Delay(rank=1, at_step=AT, delay_ms=5.0), Kill(rank=2, at_step=AT + 20)
    outcome = run(harness, *faults, steps=80)
    assert outcome.verdict.value == "passed", outcome.reasons
    outcome.assert_same_losses_as_twin()


def test_what_trains_stays_hardened(harness: Harness, substrate: KubernetesSubstrate) -> None:
    """The helper alone may change the network; the container that trains has no such right."""
    run(harness, steps=20, twin=False)
    helped_pods = [pod for pod in pods.pods().values() if "initContainers" in pod["spec"]]
    assert len(helped_pods) >= 4
    for pod in helped_pods:
        (node,) = pod["spec"]["containers"]
        (helper,) = pod["spec"]["initContainers"]
        assert node["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert helper["name"] == HELPER
        assert helper["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "NET_RAW"]


@pytest.mark.parametrize(
    "fault", [LinkDown(rank=1, at_step=AT), Bandwidth(rank=1, at_step=AT)], ids=str
)
def test_what_cannot_be_done_to_pods_is_refused(harness: Harness, fault: Fault) -> None:
    with pytest.raises(BadInput, match="use the substrate netns or docker"):
        run(harness, fault)


def test_without_helpers_it_is_refused(tmp_path: Path) -> None:
    """The error names the option that creates helpers."""
    for substrate in substrate_of(pods.options(tmp_path)):
        with pytest.raises(BadInput, match="NETWORK_FAULTS=allow"):
            run(Harness(substrate, tmp_path), Cut(rank=1, at_step=AT))


_NO_NFT = """#!/bin/sh
case "$*" in *list*) echo '{"nftables": []}';; esac
"""


def test_rules_that_do_nothing_are_no_evidence(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The command that creates the rules reports success and does nothing."""
    tools = tmp_path_factory.mktemp("tools")
    tools.chmod(0o755)
    (tools / "nft").write_text(_NO_NFT)
    (tools / "nft").chmod(0o755)
    template = json.loads(Path(pods.template(tmp_path)).read_text())
    (node,) = template["spec"]["containers"]
    node["volumeMounts"].append({"name": "tools", "mountPath": "/tools", "readOnly": True})
    node["env"] = [{"name": "PATH", "value": "/tools:/usr/bin:/bin"}]
    template["spec"]["volumes"].append({"name": "tools", "hostPath": {"path": str(tools)}})
    (tmp_path / "tools.json").write_text(json.dumps(template))
    for substrate in substrate_of(
        pods.options(tmp_path, template=str(tmp_path / "tools.json"), network_faults="allow")
    ):
        outcome = run(
            Harness(substrate, tmp_path), Cut(rank=1, at_step=AT, heal_after_s=1.0), twin=False
        )
    assert outcome.verdict.value == "unknown", outcome.reasons
