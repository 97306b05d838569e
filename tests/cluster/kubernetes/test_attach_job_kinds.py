"""Faults in running trainings of an indexed Job, a JobSet and a TrainJob.

-> test_attach.py: faults in a StatefulSet.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.attach.runs import FAULTS, assert_recovered, broken
from support.jobs import recordings
from support.jobs.training import TrainingKind, training
from support.nodes import pods

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
    pytest.mark.skipif(bool(recordings.missing()), reason=f"Kubernetes: {recordings.missing()}"),
]


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_the_same_faults_in_jobs_of_other_kinds(kind: TrainingKind, tmp_path: Path) -> None:
    with training(kind) as job:
        for number, fault in enumerate(FAULTS):
            assert_recovered(broken(job, tmp_path / str(number), fault), job)
