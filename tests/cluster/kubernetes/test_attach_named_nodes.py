"""Faults in a training whose processes show no rank: they name the node that they strike.

-> test_attach.py: faults that name ranks. support/jobs/training.py: the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.attach.runs import IMAGE, LOST_STEPS, WATCH, assert_recovered, broken, records
from support.jobs.training import TrainingJob, training
from support.nodes import pods

from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.attach.run.attach import AttachLimits, attach
from chaoskit.errors import BadInput
from chaoskit.experiment.directory import judge_directory
from chaoskit.faults import Cut, DeletePod, FreezeNode, Kill, KillContainer, KillNode
from chaoskit.faults.base import Fault
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
NODE = "llama-1"


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])


@pytest.fixture(scope="module")
def unranked() -> Iterator[TrainingJob]:
    """A StatefulSet of three pods; the first process of each trains, and shows no rank."""
    with training("statefulset", shows_ranks=False) as job:
        yield job


def broken_by_rank(job: TrainingJob, tmp_path: Path, fault: Fault, pattern: str) -> Outcome:
    """Inject a fault into a training whose log shows the ranks, and return the outcome."""
    return attach(
        job.reference,
        namespace=job.namespace,
        watch=replace(WATCH, rank=pattern),
        faults=[fault],
        image=IMAGE,
        directory=tmp_path,
        max_lost_steps=LOST_STEPS,
        deadline_s=240.0,
    )


def assert_struck(job: TrainingJob, tmp_path: Path, fault: Fault) -> None:
    """Inject a fault, and check the verdict, the recovery time, and that all names the node."""
    previews: list[FaultPreview] = []

    def confirm(rows: Sequence[FaultPreview]) -> bool:
        previews.extend(rows)
        return True

    outcome = broken(job, tmp_path, fault, limits=AttachLimits(confirm=confirm))
    assert_recovered(outcome, job)
    (row,) = previews
    assert (row.node, row.pod, row.ranks) == (NODE, NODE, ())
    (injected,) = records(outcome, Event.INJECTED)
    assert (injected["node"], injected["nodes"], injected["rank"]) == (NODE, [NODE], -1)
    assert not records(outcome, Event.RANK_FOUND)
    (record,) = outcome.faults
    assert record.rank is None
    assert f"the first process of {NODE} (pid 1) was alive" in record.evidence[0].observed
    again = judge_directory(outcome.directory)
    assert (again.verdict, again.checks) == (outcome.verdict, outcome.checks)


def test_a_killed_node_comes_back(unranked: TrainingJob, tmp_path: Path) -> None:
    assert_struck(unranked, tmp_path, KillNode(node=NODE, after_s=1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        DeletePod(node=NODE, after_s=1.0),
        KillContainer(node=NODE, after_s=1.0),
        Cut(node=NODE, after_s=1.0, heal_after_s=3.0),
        FreezeNode(node=NODE, after_s=1.0, thaw_after_s=3.0),
    ],
    ids=lambda fault: fault.kind,
)
def test_faults_from_which_it_comes_back(
    unranked: TrainingJob, tmp_path: Path, fault: Fault
) -> None:
    assert_struck(unranked, tmp_path, fault)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Kill(rank=1, after_s=1.0), "or name nodes in faults of whole nodes, such as KillNode"),
        (Kill(node=NODE, after_s=1.0), "use KillNode, KillContainer, FreezeNode or Cut"),
        (KillNode(node="llama-3", after_s=1.0), "has llama-0, llama-1, llama-2"),
    ],
    ids=["rank", "one process", "no such node"],
)
def test_a_target_that_is_not_known_is_refused_before(
    unranked: TrainingJob, tmp_path: Path, fault: Fault, words: str
) -> None:
    step = unranked.newest_step()
    with pytest.raises(BadInput, match=words):
        broken(unranked, tmp_path, fault)
    unranked.wait_for_step(step + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kill, DeletePod])
def test_ranks_by_the_log(unranked: TrainingJob, tmp_path: Path, kind: type[Fault]) -> None:
    """The successor shows its rank in a log of its own, and is found by it."""
    outcome = broken_by_rank(unranked, tmp_path, kind(rank=1, after_s=1.0), r"rank (\d+) of")
    assert_recovered(outcome, unranked)
    (injected,) = records(outcome, Event.INJECTED)
    assert (injected["node"], injected["rank"], injected["pid"]) == (NODE, 1, 1)
    shown = [entry for entry in records(outcome, Event.RANK_FOUND) if entry.source == NODE]
    assert [(entry["rank"], entry["variable"]) for entry in shown] == [(1, "log")] * 2


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"of (\d+) has joined", "both show rank 3"),
        (r"no-such-word (\d+)", "and its log shows none"),
    ],
    ids=["same rank", "no rank"],
)
def test_a_pattern_that_finds_no_ranks_is_refused_before(
    unranked: TrainingJob, tmp_path: Path, pattern: str, words: str
) -> None:
    step = unranked.newest_step()
    with pytest.raises(BadInput, match=words):
        broken_by_rank(unranked, tmp_path, Kill(rank=1, after_s=1.0), pattern)
    unranked.wait_for_step(step + 1)
