"""Measure machines that lose power:
``python -m benchmarks.pods.machines [--coordinator] [--runs N] [--json FILE]``.

The machine of rank 1, or with ``--coordinator`` the machine of the coordinator and a rank, of a job
of three. Each run gives the time from the command to the detected loss; the next step after that,
on any rank; the median step; the time until each lost node had another pod; and the steps lost.
Losses are compared with those of an unbroken run, bit by bit. Cluster, machines and commands: the
variables of ``docs/kubernetes.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from chaoskit.experiment.harness import Harness
from chaoskit.journal import read_journals
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.marks import CORDON, mark
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Verdict
from faults import LoseMachine

JOB = f"{Path(__file__).parents[2] / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
STEPS, AT, STEP_S = 600, 40, 0.03


def machines_of(api: KubernetesApi) -> dict[str, str]:
    """Return the machine of each station's pod. No other session may use the namespace."""
    pods = api.find("Pod", manifests.SESSION)
    return {pod["metadata"]["labels"][manifests.STATION]: pod["spec"]["nodeName"] for pod in pods}


def run_beside_coordinator(directory: Path) -> Outcome:
    """Run in a session of its own, with the coordinator on a machine other than the driver's, which
    must not be broken.
    """
    options = KubernetesOptions.from_environment(os.environ)
    api, undo = KubernetesApi(options.context, options.namespace), UndoLog()
    with Harness("kubernetes", directory) as harness:
        harness.host.reach()
        uncordon = mark(api, CORDON, machines_of(api)["driver"], undo)
        harness.run(JOB, nodes=3, steps=AT, options={"step_s": STEP_S}, twin=False)
        uncordon()
        machines = machines_of(api)
        return run(
            harness,
            next(rank for rank in range(3) if machines[f"node{rank}"] == machines["coordinator"]),
            0,
        )


def run(harness: Harness, rank: int, replacements: int) -> Outcome:
    """Run with the loss of the machine of ``rank``. Raises RuntimeError if the run did not pass."""
    outcome = harness.run(
        JOB,
        nodes=3,
        spares=0,
        steps=STEPS,
        options={"step_s": STEP_S},
        faults=[LoseMachine(rank=rank, at_step=AT)],
        node_replacements=replacements,
    )
    if outcome.verdict is not Verdict.PASSED:
        raise RuntimeError("; ".join(outcome.reasons))
    outcome.assert_same_losses_as_twin()
    return outcome


def measure(outcome: Outcome) -> dict[str, float]:
    """Return the figures of ``outcome``, in milliseconds from the command."""
    records = read_journals(Path(outcome.directory) / "journal")
    begun_ns = next(record.t_ns for record in records if record.event == Event.INJECTED)
    lost_ns = next(record.t_ns for record in records if record.event == Event.NODE_LOST)
    commits = [record for record in records if record.event == Event.COMMIT]
    before = [
        record.t_ns for record in commits if record.source == "node0.0" and record.t_ns < begun_ns
    ]
    replaced = [record.t_ns for record in records if record.event == Event.NODE_REPLACED]
    return {
        "known_ms": (lost_ns - begun_ns) / 1e6,
        "next_step_ms": (min(record.t_ns for record in commits if record.t_ns > lost_ns) - lost_ns)
        / 1e6,
        "step_ms": median((later - earlier) / 1e6 for earlier, later in pairwise(before)),
        "replaced_ms": (max(replaced, default=begun_ns) - begun_ns) / 1e6,
        "lost_steps": outcome.lost_steps,
    }


def main() -> None:
    """Measure, print a line for each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--coordinator", action="store_true", help="the coordinator's machine, with a rank on it"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    measured = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as open_:
        if not arguments.coordinator:
            harness = open_.enter_context(Harness("kubernetes", directory))
            harness.run(
                JOB, nodes=3, steps=AT, options={"step_s": STEP_S}, twin=False
            )  # not counted: pods are cold
        for number in range(arguments.runs):
            beside = Path(directory) / str(number)
            outcome = (
                run_beside_coordinator(beside) if arguments.coordinator else run(harness, 1, 3)
            )
            measured.append(measure(outcome))
            print(
                "known after {known_ms:6.1f} ms, next step {next_step_ms:6.1f} ms later, step {step_ms:4.1f} ms, "
                "replaced after {replaced_ms:7.1f} ms, lost steps {lost_steps}".format(
                    **measured[-1]
                ),
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
