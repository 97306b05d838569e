"""Tests of the hands of other runs in the pods of a job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.hands.other_hands import container_of, earlier_hand, running_hands

RUNNING = {"running": {}}
ENDED = {"terminated": {"exitCode": 0}}
WAITING = {"waiting": {"reason": "ContainerCreating"}}
NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff"}}
OWN = "chaoskit-hand-processes-b"


def pod(**states: dict[str, Any]) -> dict[str, Any]:
    """Return a pod with ephemeral containers in this order; underscores are hyphens."""
    names = {name.replace("_", "-"): state for name, state in states.items()}
    return {
        "metadata": {"name": "llama-0"},
        "spec": {"ephemeralContainers": [{"name": name} for name in names]},
        "status": {
            "phase": "Running",
            "ephemeralContainerStatuses": [
                {"name": name, "state": state} for name, state in names.items() if state
            ],
        },
    }


def test_only_running_hands_of_ours_refuse_a_run() -> None:
    states = {"chaoskit_hand_processes_a": ENDED, "debugger_x": RUNNING}
    assert running_hands(pod(**states)) == []
    states["chaoskit_hand_network_a"] = RUNNING
    assert running_hands(pod(**states)) == ["chaoskit-hand-network-a"]
    assert running_hands({"spec": {}, "status": {}}) == []


@pytest.mark.parametrize(
    ("state", "counts"),
    [(RUNNING, True), (WAITING, True), ({}, True), (ENDED, False), (NO_IMAGE, False)],
)
def test_an_earlier_hand_counts_unless_it_has_ended_or_cannot_start(
    state: dict[str, Any], counts: bool
) -> None:
    earlier = pod(chaoskit_hand_processes_a=state, chaoskit_hand_processes_b=RUNNING)
    assert bool(earlier_hand(earlier, OWN)) == counts
    assert not earlier_hand(earlier, "chaoskit-hand-processes-a")


def test_hands_that_find_a_user_or_are_on_the_network_do_not_count() -> None:
    """Each run has exactly one hand on processes in a pod, which makes an order."""
    others = pod(
        chaoskit_hand_user_a=RUNNING,
        chaoskit_hand_network_a=RUNNING,
        chaoskit_hand_processes_b=RUNNING,
        chaoskit_hand_processes_a=WAITING,
    )
    assert not earlier_hand(others, OWN)


@given(st.permutations(["a"] * 3 + ["b"] * 3))
def test_of_two_runs_exactly_one_goes_on(turns: list[str]) -> None:
    """Each run creates its hand, sees it run, and looks for an earlier one; in any interleaving."""
    states: dict[str, dict[str, Any]] = {}
    steps = dict.fromkeys("ab", 0)
    refused: dict[str, bool] = {}
    for run in turns:
        name = f"chaoskit_hand_processes_{run}"
        if steps[run] == 0:
            states[name] = WAITING
        elif steps[run] == 1:
            states[name] = RUNNING
        else:
            own = name.replace("_", "-")
            refused[run] = bool(earlier_hand(pod(**states), own))
            states[name] = ENDED if refused[run] else RUNNING
        steps[run] += 1
    assert sorted(refused.values()) == [False, True]


def test_the_container_of_a_hand_is_the_first_word_of_its_name() -> None:
    assert container_of(f"{OWN} in llama-0") == OWN
