"""Guard rails refuse faults that may do more damage than the user allows, before anything starts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.found import found_job

from chaoskit.attach.guards.guard_rails import PROTECTED, GuardRails
from chaoskit.attach.guards.guarded_job import GuardedJob, GuardedNode, guarded_job
from chaoskit.attach.guards.reach import Reach, count_nodes, reach_of
from chaoskit.errors import BadInput
from chaoskit.faults import BadBatch, Cut, DeleteCoordinatorPod, Fault, Kill, KillNode, LoseMachine
from chaoskit.faults.base import DRAWN_ROLES


def job_of(
    nodes: int,
    *,
    ranks_per_node: int = 1,
    labels: dict[int, dict[str, str]] | None = None,
    **more: Any,
) -> GuardedJob:
    """Return a job whose nodes ``n0``, ``n1`` and so on lie on two machines."""
    return GuardedJob(
        "statefulset/llama",
        tuple(
            GuardedNode(
                f"n{index}",
                f"llama-{index}",
                f"uid{index}",
                f"m{index % 2}",
                (labels or {}).get(index, {}),
            )
            for index in range(nodes)
        ),
        more.get(
            "ranks", {rank: f"n{rank // ranks_per_node}" for rank in range(nodes * ranks_per_node)}
        ),
        more.get("owners", {}),
    )


def refusal(
    rails: GuardRails, job: GuardedJob, faults: list[Fault], nodes: int | None = None
) -> str:
    with pytest.raises(BadInput) as caught:
        rails.check(job, faults, nodes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def kills(*ranks: int | str) -> list[Fault]:
    return [Kill(rank=rank, at_step=5) for rank in ranks]


def test_one_node_stays_untouched_without_a_limit_of_the_user() -> None:
    GuardRails().check(job_of(3), kills(0, 1, 1))
    assert refusal(GuardRails(), job_of(3), kills(0, 1, 2)) == (
        "max_nodes=None: set it to 3, or strike fewer nodes: the faults may strike 3 of 3 nodes, "
        "and without a limit of yours one node must stay untouched"
    )
    assert "set it to 1" in refusal(GuardRails(), job_of(1), kills(0))
    GuardRails(max_nodes=3).check(job_of(3), kills(0, 1, 2))
    GuardRails(max_share=1).check(job_of(3), kills("all"))


def test_limits_of_the_user() -> None:
    assert refusal(GuardRails(max_nodes=1), job_of(4), kills(0, 1)) == (
        "max_nodes=1: use 2 or more, or strike fewer nodes: the faults may strike 2 of 4 nodes"
    )
    assert refusal(GuardRails(max_share=0.25), job_of(4), kills(0, 1)) == (
        "max_share=0.25: use 0.5 or more, or strike fewer nodes: the faults may strike 2 of 4 nodes, "
        "and this share allows 1"
    )
    assert "max_share=0.5" in refusal(
        GuardRails(max_nodes=3, max_share=0.5), job_of(4), kills(0, 1, 2)
    )
    assert "max_nodes=1" in refusal(GuardRails(max_nodes=1, max_share=0.5), job_of(4), kills(0, 1))
    assert GuardRails(max_share=0.29).limit(100) == 29  # 0.29 * 100 is below 29


def test_a_share_that_the_remedy_names_is_accepted() -> None:
    for nodes, struck in ((3, 2), (7, 3), (12, 7), (64, 43)):
        job, faults = job_of(nodes), kills(*range(struck))
        text = refusal(GuardRails(max_share=0.01), job, faults)
        share = float(text.split("use ")[1].split()[0])
        GuardRails(max_share=share).check(job, faults)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_nodes", 0),
        ("max_nodes", True),
        ("max_nodes", "2"),
        ("max_share", 0.0),
        ("max_share", 1.5),
        ("max_share", float("nan")),
        ("min_nodes", -1),
        ("protected", "chaoskit.dev/protected"),
        ("protected", ("",)),
        ("protected", ("=x",)),
    ],
)
def test_a_limit_that_cannot_be_one(field: str, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        GuardRails(**{field: value}).check(job_of(3), [])
    assert caught.value.field.startswith(field)


def test_a_job_of_another_size() -> None:
    GuardRails(min_nodes=3).check(job_of(3), kills(0), nodes=3)
    assert "nodes=4: use 3, or wait" in refusal(GuardRails(), job_of(3), kills(0), nodes=4)
    assert "nodes=2: use 3, or wait" in refusal(GuardRails(), job_of(3), kills(0), nodes=2)
    assert "min_nodes=4: use 3 or less" in refusal(GuardRails(min_nodes=4), job_of(3), kills(0))
    assert "it has none" in refusal(GuardRails(), job_of(0), kills(0))


def test_a_protected_pod_is_never_struck() -> None:
    job = job_of(3, labels={1: {"chaoskit.dev/protected": "yes"}})
    GuardRails().check(job, kills(0, 2))
    text = refusal(GuardRails(), job, kills(0, 1))
    assert "protected='chaoskit.dev/protected=yes'" in text
    assert "pod llama-1 has it, and Kill(rank=1, at_step=5) strikes that pod" in text
    assert "may strike that pod" in refusal(GuardRails(), job, kills("any"))
    assert "may strike that pod" in refusal(GuardRails(), job, kills(7))
    machine_label = job_of(3, labels={1: {"chaoskit.dev/protect": ""}})
    assert "chaoskit.dev/protect=" in refusal(GuardRails(), machine_label, kills(1))
    # the machine of rank 1 has no other pod, that of rank 0 has the one of rank 2, too
    assert "strikes that pod" in refusal(
        GuardRails(),
        job_of(3, labels={2: {"chaoskit.dev/protected": ""}}),
        [LoseMachine(rank=0, at_step=5)],
    )


def test_labels_of_the_user() -> None:
    job = job_of(3, labels={1: {"tier": "gold"}})
    GuardRails().check(job, kills(1))
    GuardRails(protected=("tier=silver",)).check(job, kills(1))
    assert "tier=gold" in refusal(GuardRails(protected=("tier=gold",)), job, kills(1))
    assert "tier=gold" in refusal(GuardRails(protected=("tier",)), job, kills(1))


def test_a_protected_namespace_or_job() -> None:
    for owner in ("namespace ml", "TrainJob llama"):
        job = job_of(3, owners={"JobSet llama": {}, owner: {"chaoskit.dev/protected": "1"}})
        assert f"{owner} has it" in refusal(GuardRails(), job, kills(0))
        with pytest.raises(BadInput, match=f"{owner} has it"):
            GuardRails().check_job(job)


def test_at_the_moment_of_a_strike() -> None:
    rails, job = GuardRails(max_nodes=2), job_of(3, labels={2: {"chaoskit.dev/protected": ""}})
    first, second, third = job.nodes
    assert rails.why_not(first, (), 3) == ""
    assert rails.why_not(second, {"n0"}, 3) == ""
    assert rails.why_not(second, {"n0", "n1"}, 3) == ""
    assert rails.why_not(second, {"n0", "n2"}, 3) == "it would be node 3 of 2 that may be struck"
    assert rails.why_not(third, (), 3) == "pod llama-2 has the label chaoskit.dev/protected="


def test_the_reach_of_a_fault() -> None:
    job = job_of(4, ranks_per_node=2)
    assert reach_of(Kill(rank=3, at_step=1), job) == Reach(frozenset({"n1"}))
    assert reach_of(Kill(rank=9, at_step=1), job) == Reach(frozenset(), 1)
    assert reach_of(Kill(rank="any", at_step=1), job) == Reach(frozenset(), 1)
    assert reach_of(Kill(rank="most_shards", at_step=1), job) == Reach(frozenset(), 1)
    assert reach_of(Kill(rank="minority", at_step=1), job) == Reach(frozenset(), 3)
    assert reach_of(Kill(rank="all", at_step=1), job) == Reach(frozenset(), 4)
    assert reach_of(DeleteCoordinatorPod(rank="all", at_step=1), job) == Reach(frozenset(), 1)
    assert reach_of(BadBatch(at_step=1), job).nodes == {"n0", "n1", "n2", "n3"}
    assert reach_of(Cut(rank=0, side=(2,), at_step=1), job).nodes == {"n0", "n1"}
    assert reach_of(Cut(rank=0, apart_from=(2, 4), at_step=1), job).nodes == {"n0", "n1", "n2"}
    assert reach_of(LoseMachine(rank=0, at_step=1), job).nodes == {"n0", "n2"}
    assert reach_of(LoseMachine(rank="any", at_step=1), job).others == 2
    unread = job_of(4, ranks={})
    assert reach_of(Kill(rank=0, at_step=1), unread) == Reach(frozenset(), 1)
    assert reach_of(KillNode(node="n3", at_step=1), unread) == Reach(frozenset({"n3"}))
    assert reach_of(LoseMachine(node="n3", at_step=1), unread) == Reach(frozenset({"n1", "n3"}))
    assert reach_of(Cut(node="n3", side=(0,), at_step=1), unread) == Reach(frozenset({"n3"}), 1)


def test_a_named_node_counts_once() -> None:
    job = job_of(3, ranks={1: "n1"}, labels={0: {"chaoskit.dev/protected": ""}})
    faults: list[Fault] = [
        KillNode(node="n1", at_step=1),
        KillNode(rank=1, at_step=2),
        KillNode(node="n2", at_step=3),
    ]
    GuardRails().check(job, faults)
    assert "the faults may strike 2 of 3 nodes" in refusal(GuardRails(max_nodes=1), job, faults)
    assert "pod llama-0 has it" in refusal(GuardRails(), job, [KillNode(node="n0", at_step=1)])


_RANKS = st.one_of(st.integers(0, 5), st.sampled_from(["any", "minority", "all_but_one"]))


@given(
    nodes=st.integers(2, 4),
    read=st.sets(st.integers(0, 5)),
    faults=st.lists(st.builds(KillNode, rank=_RANKS, at_step=st.just(1)), max_size=3),
)
def test_the_worst_case_is_never_exceeded(nodes: int, read: set[int], faults: list[Fault]) -> None:
    """Compare with all nodes on which ranks that were not read, or are drawn, may be."""
    job = job_of(nodes, ranks={rank: f"n{rank}" for rank in read if rank < nodes})
    names = [node.name for node in job.nodes]
    unread = sorted(
        {fault.rank for fault in faults if isinstance(fault.rank, int)} - job.ranks.keys()
    )
    worst = 0
    for places in product(names, repeat=len(unread)):
        held = {**job.ranks, **dict(zip(unread, places, strict=True))}
        struck = {held[fault.rank] for fault in faults if isinstance(fault.rank, int)}
        drawn = sum(
            DRAWN_ROLES[fault.rank](nodes) for fault in faults if isinstance(fault.rank, str)
        )
        worst = max(worst, min(nodes, len(struck) + drawn))
    named = [fault.rank for fault in faults if fault.rank in unread]
    # a rank that was not read may move between two faults: each of them counts
    assert worst <= count_nodes(faults, job) <= worst + len(named) - len(unread)


def test_nodes_and_labels_of_a_job_that_was_found() -> None:
    job = guarded_job(found_job({1: {PROTECTED[0]: "true"}}), {0: "llama-1"}, {"namespace ml": {}})
    assert [(node.name, node.pod, node.uid, node.machine) for node in job.nodes] == [
        (f"llama-{index}", f"llama-{index}", f"uid-llama-{index}", f"machine{index}")
        for index in range(3)
    ]
    assert "pod llama-1 has it" in refusal(GuardRails(), job, kills(0))
    assert job.rank_count == 3
