"""The targets of faults in a job that runs: ranks, or nodes by name. What cannot be is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.jobs.found import found_job

from chaoskit import LogPatterns
from chaoskit.attach.hands.hand_container import HandMeans
from chaoskit.attach.run.plan import (
    attach_settings,
    needs_ranks,
    plan_attached,
    require_faults,
    require_nodes,
    without_ranks,
)
from chaoskit.attach.run.substrate import require_distinct
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.command_plan import plan_command
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.faults import Cut, DeletePod, Fault, Kill, KillNode, Loss, Straggle

WATCH = LogPatterns(step=r"step (\d+)")


def planned(*faults: Fault, ranks: dict[int, str] | None = None) -> Sequence[Fault]:
    job, typed = found_job(), require_faults(faults, HandMeans())
    require_nodes(job, typed)
    return plan_attached(job, ranks or {}, WATCH, typed, attach_settings(seed=1)).faults


def test_a_named_node_needs_no_rank() -> None:
    faults = [
        KillNode(node="llama-1", after_s=5.0),
        DeletePod(node="llama-2", at_step=7, grace_s=2),
        Cut(node="llama-0", after_s=1.0, heal_after_s=3.0),
        Loss(node="llama-0", after_s=1.0, apart_from="ranks", share=0.5),
    ]
    assert not needs_ranks(faults)
    assert list(planned(*faults)) == faults
    experiment = plan_attached(found_job(), {}, WATCH, (faults[0],), attach_settings())
    assert (experiment.nodes, experiment.ranks) == (3, 0)


def test_ranks_and_nodes_in_one_plan() -> None:
    ranks = {0: "llama-2", 1: "llama-1"}
    faults = [Kill(rank=1, after_s=1.0), Cut(node="llama-2", apart_from=(1,), after_s=9.0)]
    assert needs_ranks(faults)
    assert needs_ranks(faults[1:])
    assert list(planned(*faults, ranks=ranks)) == faults
    role, node = planned(KillNode(rank="any", after_s=1.0), faults[1], ranks=ranks)
    assert (role.rank in ranks, node) == (True, faults[1])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (KillNode(rank=1, node="llama-1", after_s=5), "and not both"),
        (KillNode(after_s=5), "name a rank, or the node of a pod"),
        (Kill(node="llama-1", after_s=5), "use KillNode, KillContainer, FreezeNode or Cut"),
        (Straggle(node="llama-1", after_s=5, how="quota"), "strikes one process"),
        (KillNode(node="llama-7", after_s=5), "has llama-0, llama-1, llama-2"),
        (KillNode(node="llama_1", after_s=5), "write llama-1"),
        (KillNode(node="llama-1"), "exactly one of at_step, after_s"),
        (DeletePod(node="llama-1", after_s=5, grace_s=-1), "use a whole number of seconds"),
        (Cut(node="llama-1", side=(2,), after_s=5), "it has none that is known"),
        (Cut(node="llama-1", apart_from="llama-2", after_s=5), "or a tuple of ranks"),
    ],
)
def test_a_target_that_cannot_be_struck(fault: Fault, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        planned(fault)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sides_of_a_partition_are_ranks_of_the_job() -> None:
    with pytest.raises(BadInput, match="name ranks of the job: it has 0, 4"):
        planned(Cut(rank=0, side=(1,), after_s=5), ranks={0: "llama-0", 4: "llama-1"})


def test_the_remedy_without_ranks_names_a_node_of_the_job() -> None:
    error = without_ranks(found_job(), ["llama-0: no process was started with a rank"])
    assert "KillNode(node='llama-0', after_s=5)" in error.remedy
    assert "llama-0: no process was started with a rank" in error.remedy


def test_other_runs_have_no_nodes_by_name() -> None:
    fault = KillNode(node="node1", at_step=3)
    with pytest.raises(BadInput, match="name a rank: node= is for jobs that run already"):
        plan_command(["true"], watch=WATCH, nodes=2, faults=[fault])
    with pytest.raises(BadInput, match="name a rank: node= is for jobs that run already"):
        plan_experiment("gpt", nodes=2, steps=9, faults=[fault])


def test_ranks_in_lines_of_a_log() -> None:
    lines = ["rank 3 of 4 has joined", "\x1b[32mrank 3\x1b[0m", "step 3", "rank none", "rank 12x"]
    assert LogPatterns(step=r"step (\d+)", rank=r"rank (\w+)").ranks(lines) == {3}
    assert LogPatterns(step=r"step (\d+)", rank=r"rank (\d+)").ranks(lines) == {3, 12}
    assert WATCH.ranks(lines) == set()


@pytest.mark.parametrize("pattern", ["rank (", r"rank \d+", r"(rank) (\d+)"])
def test_a_pattern_of_ranks_that_cannot_be_one(pattern: str) -> None:
    with pytest.raises(BadInput) as refused:
        LogPatterns(step=r"step (\d+)", rank=pattern)
    assert refused.value.field == "rank"


def test_a_command_has_no_ranks_by_its_log() -> None:
    with pytest.raises(BadInput, match="leave it out: it is for jobs that run already"):
        plan_command(["true"], watch=LogPatterns(step="(1)", rank="(2)"), faults=[])


def test_a_rank_that_two_logs_show() -> None:
    require_distinct(r"rank (\d+)", {"llama-0": 1, "llama-1": 0})
    with pytest.raises(BadInput, match="the logs of llama-0 and llama-2 both show rank 1"):
        require_distinct(r"rank (\d+)", {"llama-0": 1, "llama-1": 0, "llama-2": 1})
