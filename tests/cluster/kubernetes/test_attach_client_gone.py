"""Faults of a client that is killed while its network is gone, so that no hand reads an end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.attach.runs import client_command, user_files
from support.jobs.training import TrainingJob, training
from support.nodes import pods
from support.nodes.client_network import client_network, no_networks
from support.waiting import wait_until

from chaoskit.journal import read_events
from chaoskit.vocabulary import Event

WHY_NOT = pods.unavailable() or no_networks()
pytestmark = [
    pytest.mark.costly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"Kubernetes: {WHY_NOT}"),
]
RANK, POD = 1, "llama-1"
#: Seconds for which an effect lasts without a line of its client, in the hand and in the kernel.
TIME_TO_LIVE_S = 10.0
#: The hand and the kernel may be late by this, and so may this test.
LATE_S = 1.0
#: Limit of the wait for an effect that does not end.
_LIMIT_S = 60.0
FAULTS = ("Hang(rank=1, after_s=0.5)", "Cut(rank=1, after_s=0.5)")


@pytest.fixture(scope="module")
def patient() -> Iterator[TrainingJob]:
    """A StatefulSet of three pods, whose agents wait for a stopped rank for longer than a hand."""
    with training("statefulset", step_limit_s=60.0) as job:
        yield job


def is_stopped(job: TrainingJob) -> Callable[[], bool]:
    """Return a function that returns whether the rank is stopped by its tracer."""
    process = job.rank_process(RANK)
    return lambda: process.status() == psutil.STATUS_TRACING_STOP


def drops_packets() -> Callable[[], bool]:
    """Return a function that returns whether the kernel drops packets of the pod."""
    pid = pods.processes(pods.pods()[POD])[0].pid
    command = ["nsenter", "--target", str(pid), "--net", "nft", "list", "ruleset"]

    def drops() -> bool:
        rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return "expires" in rules  # an address whose packets are dropped has a time to live

    return drops


def hand_states() -> list[str]:
    """Return the state of each hand of the job."""
    return [
        next(iter(status["state"]), "")
        for pod in pods.pods().values()
        for status in pod["status"].get("ephemeralContainerStatuses", ())
    ]


@pytest.mark.parametrize("number", range(5))
def test_nothing_acts_for_longer_than_its_time_to_live(
    patient: TrainingJob, tmp_path: Path, number: int
) -> None:
    fault = FAULTS[number % len(FAULTS)]
    command = client_command(patient, fault, *user_files(tmp_path))
    command += ["--report", str(tmp_path / "report")]
    journals = tmp_path / "report" / "001-statefulset-llama" / "journal"
    environment = {**os.environ, "KUBECONFIG": os.environ[pods.VARIABLE_OF_TESTS]}
    patient.wait_for_step(patient.newest_step() + 2)
    acts = is_stopped(patient) if fault.startswith("Hang") else drops_packets()
    with client_network() as network:
        with subprocess.Popen(
            [*network.prefix, *command], env=environment, stdout=subprocess.DEVNULL
        ) as client:
            try:
                wait_until(
                    lambda: journals.is_dir() and read_events(journals, Event.EVIDENCE), fault
                )
                network.unplug()
            finally:
                client.kill()
        gone_ns, step = time.monotonic_ns(), patient.newest_step()
        assert acts()
        wait_until(lambda: not acts(), "the end of the fault", limit_s=_LIMIT_S, poll_s=0.02)
        acted_s = (time.monotonic_ns() - gone_ns) / 1e9
    patient.wait_for_step(step + 2)
    next_ns = next(entry.at_ns for entry in patient.recorded_steps() if entry.step > step + 1)
    step_s = (next_ns - gone_ns) / 1e9
    print(f"{fault}: it acted for {acted_s:.2f} s without its client, a step after {step_s:.2f} s")
    assert 1.0 < acted_s < TIME_TO_LIVE_S + LATE_S
    wait_until(lambda: set(hand_states()) == {"terminated"}, "the end of all hands")
