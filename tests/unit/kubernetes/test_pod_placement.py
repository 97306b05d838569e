"""Lost machines, and pods that keep off them. No cluster is asked."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.substrate.kubernetes.pods.pod_placement import (
    AVOID_S,
    LostMachines,
    keep_off,
    only_on,
    rather_not_on,
)


def terms(pod: dict[str, Any]) -> Any:
    return pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]


OFF = {"key": "metadata.name", "operator": "NotIn", "values": ["m1"]}


def test_a_pod_keeps_off_a_machine() -> None:
    pod: dict[str, Any] = {"spec": {}}
    keep_off(pod, ["m1", "m2"])
    assert terms(pod) == [{"matchFields": [OFF, OFF | {"values": ["m2"]}]}]


def test_it_keeps_off_whichever_of_its_own_terms_is_met() -> None:
    """Terms are alternatives: another term could allow a machine that is excluded in one only."""
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    disk = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m1", "m3"]}]}
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": deepcopy([zone, disk])
        }
    }
    pod: dict[str, Any] = {"spec": {"affinity": {"nodeAffinity": required}}}
    keep_off(pod, ["m1"])
    assert terms(pod) == [
        zone | {"matchFields": [OFF]},
        {"matchFields": [*disk["matchFields"], OFF]},
    ]


def test_a_pod_goes_to_one_of_some_machines_whichever_of_its_own_terms_is_met() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [dict(zone)]}
    }
    pod: dict[str, Any] = {"spec": {"affinity": {"nodeAffinity": required}}}
    only_on(pod, ["m1", "m2"])
    on = OFF | {"operator": "In"}
    assert terms(pod) == [
        zone | {"matchFields": [on]},
        zone | {"matchFields": [on | {"values": ["m2"]}]},
    ]


def test_a_pod_that_need_not_be_there_rather_goes_elsewhere() -> None:
    pod: dict[str, Any] = {"spec": {}}
    rather_not_on(pod, ["m1"])
    (wish,) = pod["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert wish == {"weight": 100, "preference": {"matchFields": [OFF]}}


def test_nothing_is_asked_for_where_no_machine_is_lost() -> None:
    pod: dict[str, Any] = {"spec": {}}
    for place in (keep_off, only_on, rather_not_on):
        place(pod, [])
    assert pod == {"spec": {}}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0, 2 * AVOID_S)), max_size=8)
)
def test_a_machine_is_avoided_until_it_is_back_or_the_scheduler_knows(
    events: list[tuple[str, bool, float]],
) -> None:
    lost, now_s, since = LostMachines(), 0.0, dict[str, float]()
    for machine, is_back, passed_s in events:
        now_s += passed_s
        if is_back:
            lost.note_back(machine)
            since.pop(machine, None)
        else:
            lost.note_lost(machine, now_s)
            since[machine] = now_s
        assert lost.avoided(now_s) == tuple(
            sorted(name for name in since if now_s - since[name] < AVOID_S)
        )


def test_a_machine_that_is_not_known_is_not_avoided() -> None:
    lost = LostMachines()
    lost.note_lost("", 0.0)
    assert lost.avoided(1.0) == ()
