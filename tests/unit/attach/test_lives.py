"""Tests of the present life of a place, and of ends of lives."""

from __future__ import annotations

import dataclasses

import pytest

from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.places import JobPlaces, Place
from chaoskit.attach.jobs.pod_state import ContainerState, PodState
from chaoskit.attach.run.lives import (
    LINGER_S,
    Lingering,
    PodLife,
    is_end_proved,
    is_left_behind,
    is_life_over,
    is_pod_over,
    present_life,
    why_over,
)

KEY = PlaceKey("llama", 1)
RUNNING = ContainerState("train", "containerd://a", state="running")
POD = PodState(
    "uid-a",
    "llama-1",
    node="machine-2",
    address="10.0.0.7",
    phase="Running",
    container_names=("train",),
    containers=(RUNNING,),
)
LIFE = PodLife("llama-1", "uid-a", "containerd://a", "machine-2", 0)


def places(pod: PodState | None, *former_pods: PodState) -> JobPlaces:
    return JobPlaces((Place(KEY, pod, 0.0, former_pods),))


def with_container(**fields: object) -> PodState:
    return dataclasses.replace(POD, containers=(dataclasses.replace(RUNNING, **fields),))


def test_a_running_container_is_the_present_life() -> None:
    assert present_life(places(POD).places[0], "train") == LIFE
    assert KEY.node_name == "llama-1"


@pytest.mark.parametrize(
    "pod", [None, with_container(state="waiting"), with_container(container_id="")]
)
def test_a_place_without_a_running_container_has_no_life(pod: PodState | None) -> None:
    assert present_life(places(pod).places[0], "train") is None


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (places(None), "the pod llama-1 was deleted"),
        (
            places(None, dataclasses.replace(POD, is_deleted=True)),
            "the pod llama-1 was deleted",
        ),
        (
            places(with_container(state="terminated", exit_code=137, reason="Error")),
            "the container train of llama-1 ended with exit code 137 (Error)",
        ),
        (
            places(
                with_container(
                    container_id="containerd://b",
                    restart_count=1,
                    last_exit_code=1,
                    last_reason="Error",
                )
            ),
            "the container train of llama-1 ended with exit code 1 (Error)",
        ),
        (
            places(with_container(state="waiting", reason="CrashLoopBackOff")),
            "the container train of llama-1 does not run: CrashLoopBackOff",
        ),
    ],
)
def test_an_end_is_proved_and_has_a_cause(after: JobPlaces, cause: str) -> None:
    assert is_life_over(after, LIFE.uid, LIFE.container_id, "train")
    assert why_over(after, LIFE, "train") == cause


@pytest.mark.parametrize(
    "after",
    [
        places(POD),
        places(dataclasses.replace(POD, is_terminating=True)),
        places(dataclasses.replace(POD, is_node_silent=True)),
        places(with_container(container_id="", state="")),
    ],
)
def test_a_life_whose_end_is_not_proved_goes_on(after: JobPlaces) -> None:
    """The processes of a silent machine, and of a pod that has time to end, may still run."""
    assert not is_life_over(after, LIFE.uid, LIFE.container_id, "train")
    assert not is_pod_over(after, "uid-a")


SILENT = dataclasses.replace(POD, is_node_silent=True)


def test_a_life_on_a_silent_machine_is_left_behind_by_a_successor_only() -> None:
    successor = dataclasses.replace(POD, uid="uid-b", node="machine-3")
    assert is_left_behind(places(successor, SILENT), LIFE)
    assert why_over(places(successor, SILENT), LIFE, "train") == (
        "the machine machine-2 of the pod llama-1 is silent"
    )
    for after in (places(SILENT), places(POD), places(successor, POD), places(successor)):
        assert not is_left_behind(after, LIFE)
    of_successor = LIFE._replace(uid="uid-b", machine="machine-3")
    assert not is_left_behind(places(successor, SILENT), of_successor)


def test_a_successor_in_the_place_does_not_end_a_pod_that_runs() -> None:
    """A pod on a silent machine may run beside its successor."""
    successor = dataclasses.replace(POD, uid="uid-b")
    assert not is_pod_over(places(successor, POD), "uid-a")
    assert is_pod_over(places(successor), "uid-a")


REMOVED = dataclasses.replace(POD, is_deleted=True)


@pytest.mark.parametrize(
    ("after", "by_report", "by_hand"),
    [
        (places(POD), False, False),
        (places(dataclasses.replace(POD, is_terminating=True)), False, False),
        # removed by force, or with its machine: the kubelet has reported nothing
        (places(None, REMOVED), False, True),
        (places(None), False, True),
        (places(dataclasses.replace(POD, phase="Failed")), False, True),
        (places(with_container(state="terminated", exit_code=137)), True, True),
        (places(with_container(container_id="containerd://b")), True, True),
        (
            places(None, dataclasses.replace(with_container(state="terminated"), is_deleted=True)),
            True,
            True,
        ),
    ],
)
def test_the_kubelet_or_the_hand_proves_an_end(
    after: JobPlaces, by_report: bool, by_hand: bool
) -> None:
    """The end of a hand alone proves nothing: it may have been killed."""
    assert is_end_proved(after, LIFE, "train", has_hand_ended=False) == by_report
    assert is_end_proved(after, LIFE, "train", has_hand_ended=True) == by_hand


def test_a_life_is_given_up_only_after_a_silence_of_its_hand() -> None:
    lingering = Lingering()
    for now_s in range(100):
        assert not lingering.is_given_up(now_s, answers=True)
    assert not lingering.is_given_up(100.0, answers=False)
    assert not lingering.is_given_up(100.0 + LINGER_S, answers=False)
    assert lingering.is_given_up(100.1 + LINGER_S, answers=False)
    assert not lingering.is_given_up(130.0, answers=True)
    assert not lingering.is_given_up(131.0, answers=False)
