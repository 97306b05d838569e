"""Faults in trainings of namespaces that enforce a level of Pod Security: what works, and how a
refusal is said.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.attach.runs import assert_recovered, broken, client_command, user_files
from support.jobs.training import PodSecurity, TrainingJob, training
from support.nodes import pods

from chaoskit.cli.app import run
from chaoskit.errors import BadInput
from chaoskit.faults import Bandwidth, Cut, Hang, Kill, Loss, Reset
from chaoskit.faults.base import Fault
from chaoskit.vocabulary import Verdict

pytestmark = [
    pytest.mark.costly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
]
NETWORK_FAULTS: list[Fault] = [
    Cut(rank=1, after_s=1.0, heal_after_s=3.0),
    Reset(rank=1, after_s=1.0),
    Loss(rank=1, after_s=1.0, share=0.5, heal_after_s=1.0),
    Bandwidth(rank=1, after_s=1.0, heal_after_s=1.0),
]


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])


def hands() -> list[str]:
    """Return the names of all hands in pods of the namespace."""
    return [
        hand["name"]
        for pod in pods.pods().values()
        for hand in pod["spec"].get("ephemeralContainers") or ()
    ]


def check_processes(job: TrainingJob, runs: Path) -> None:
    """Check that a killed and a stopped rank have their verdicts."""
    for number, fault in enumerate((Kill(rank=1, after_s=1.0), Hang(rank=1, after_s=1.0))):
        assert_recovered(broken(job, runs / str(number), fault, observe_s=2.0), job)
    assert all("-processes-" in name for name in hands())


def check_network_is_refused(job: TrainingJob, runs: Path, level: str) -> None:
    """Check that faults of the network are refused with the level, before anything is made."""
    assert not hands()
    for fault in NETWORK_FAULTS:
        with pytest.raises(BadInput, match=f'violates PodSecurity "{level}:') as refused:
            broken(job, runs, fault)
        assert (refused.value.field, refused.value.value) == ("job", job.reference)
        assert "let its pods have hands on their network: llama-" in refused.value.remedy
        assert "NET_ADMIN" in refused.value.remedy
    assert not hands()
    assert not runs.exists()


def check_line(
    job: TrainingJob, folder: Path, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check what the command says: one line, and status 2."""
    watch, image = user_files(folder)
    arguments = client_command(job, "Cut(rank=1, after_s=1)", watch, image)[3:]
    assert run([*arguments, "--report", str(folder / "report")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    print(line)
    assert f'violates PodSecurity "{level}:' in line
    assert not hands()


@pytest.mark.parametrize(("level", "as_root"), [("baseline", True), ("restricted", False)])
def test_processes_are_struck_and_the_network_is_refused(
    level: PodSecurity, as_root: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training("statefulset", pod_security=level, as_root=as_root, nodes=2) as job:
        check_network_is_refused(job, tmp_path / "refused", level)
        check_line(job, tmp_path, level, capsys)
        check_processes(job, tmp_path)


def test_the_level_privileged_admits_both_hands(tmp_path: Path) -> None:
    with training("statefulset", pod_security="privileged", as_root=True, nodes=2) as job:
        check_processes(job, tmp_path)
        cut = broken(job, tmp_path / "cut", NETWORK_FAULTS[0], observe_s=2.0)
        assert cut.verdict is Verdict.PASSED, cut.reasons
        assert any("-network-" in name for name in hands())
