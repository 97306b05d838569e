"""A fault in a training of twelve pods, in which the index of a pod is not its rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.attach.runs import assert_recovered, broken, records
from support.jobs.training import TrainingJob, training
from support.nodes import pods

from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.attach.run.attach import AttachLimits
from chaoskit.faults import Kill
from chaoskit.vocabulary import Event

pytestmark = [
    pytest.mark.costly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
]
PODS = 12
#: torchrun sorts nodes by their full names: ``train-10.train...`` comes before ``train-2.train...``.
STRUCK_RANK, STRUCK_POD = 2, "train-10"
#: Twelve agents and twelve ranks import torch, at the start and again after the fault.
START_LIMIT_S = 300.0


@pytest.fixture
def twelve(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingJob]:
    """A StatefulSet of twelve pods with torchrun, which need most of the machine."""
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    settings = {"nodes": PODS, "step_s": 0.2, "start_limit_s": START_LIMIT_S}
    with training("statefulset", name="train", cpu="450m", step_limit_s=60.0, **settings) as job:
        yield job


def start_ticks(process: psutil.Process) -> int:
    """Return the start time of a process in ticks of the kernel, which is the same in its pod."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


def test_a_rank_is_struck_in_its_pod_whatever_index_the_pod_has(
    twelve: TrainingJob, tmp_path: Path
) -> None:
    pod_of = {step.rank: step.pod for step in twelve.recorded_steps()}
    assert sorted(pod_of) == [*range(PODS)]
    assert pod_of[STRUCK_RANK] == STRUCK_POD
    struck_ticks = start_ticks(twelve.rank_process(STRUCK_RANK))
    previews: list[FaultPreview] = []

    def confirm(rows: Sequence[FaultPreview]) -> bool:
        previews.extend(rows)
        return True

    fault = Kill(rank=STRUCK_RANK, after_s=1.0)
    outcome = broken(twelve, tmp_path, fault, limits=AttachLimits(confirm=confirm, nodes=PODS))
    first_found = records(outcome, Event.RANK_FOUND)[:PODS]
    assert {entry["rank"]: entry.source for entry in first_found} == pod_of
    assert [(row.pod, row.ranks) for row in previews] == [(STRUCK_POD, (STRUCK_RANK,))]
    (strike,) = records(outcome, Event.INJECTED)
    assert (strike["node"], strike["ticks"]) == (STRUCK_POD, struck_ticks)
    killed = [name for name in pods.pods() if "exitcode: -9" in pods.log(name)]
    assert killed == [STRUCK_POD]
    assert_recovered(outcome, twelve)
