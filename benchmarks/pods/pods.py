"""Compare recovery in pods with other substrates:
``python -m benchmarks.pods.pods [--runs N] [--beside netns] [--json FILE]``.

A rank of three gets SIGKILL in the middle of a step; measured are the seconds until every rank has
its next step. Substrates take turns, run by run, on one machine. Cluster, image and namespace: the
variables of ``docs/kubernetes.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from chaoskit.experiment.harness import Harness
from chaoskit.vocabulary import Verdict
from faults import Kill

JOB = f"{Path(__file__).parents[2] / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
STEPS, AT, STEP_S = 60, 20, 0.03


def recovery_ms(harness: Harness) -> float:
    """Return the milliseconds of the recovery of one run. Raises RuntimeError if the run did not
    pass.
    """
    options, fault = {"step_s": STEP_S}, Kill(rank=1, at_step=AT)
    outcome = harness.run(JOB, nodes=3, steps=STEPS, options=options, faults=[fault], twin=False)
    if outcome.verdict is not Verdict.PASSED:
        raise RuntimeError("; ".join(outcome.reasons))
    return outcome.recoveries[0].seconds * 1000


def main() -> None:
    """Measure in turns, print a line for each substrate, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each substrate")
    parser.add_argument("--beside", default="netns", help="substrates, separated by commas")
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    names = ["kubernetes", *arguments.beside.split(",")]
    measured: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        harnesses = {name: Harness(name, Path(directory) / name) for name in names}
        try:
            for name in names:
                recovery_ms(harnesses[name])  # not counted: pods and supervisors are cold
            for run in range(arguments.runs):
                for name in names if run % 2 else reversed(names):
                    measured[name].append(recovery_ms(harnesses[name]))
        finally:
            for harness in harnesses.values():
                harness.close()
    for name, times in measured.items():
        ratio = median(times) / median(measured[names[1]])
        print(
            f"{name:12} median {median(times):6.1f} ms, worst {max(times):6.1f} ms, {ratio:.2f} x {names[1]}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
