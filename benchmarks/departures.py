"""Pods that are told to go: ``python benchmarks/departures.py [--runs N] [--json FILE]``.

The pod of one of three ranks is evicted with time to end, as by a drain, under an elastic policy. Of each run: the
longest time between two commits of a rank that stays, beside the median, and steps that were lost. Which cluster, image
and namespace: the variables of ``docs/kubernetes.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.experiment.harness import Harness
from chaoskit.journal import read_journals
from chaoskit.vocabulary import Event, Verdict
from faults import EvictPod

JOB = f"{Path(__file__).parents[1] / 'tests' / 'jobs' / 'troubled.py'}:plain"
STEPS, AT, STEP_S, GRACE_S = 150, 40, 0.03, 20


def departure(harness: Harness) -> dict[str, float]:
    """Of one run. Raises RuntimeError if it did not pass: then there is nothing to be compared."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3)
    fault = EvictPod(rank=1, at_step=AT, grace_s=GRACE_S)
    outcome = harness.run(
        JOB, nodes=3, steps=STEPS, options={"step_s": STEP_S}, faults=[fault], twin=False, elastic=policy
    )
    if outcome.verdict is not Verdict.PASSED:
        raise RuntimeError("; ".join(outcome.reasons))
    records = read_journals(Path(outcome.directory) / "journal")
    times = [one.t_ns for one in records if one.event == Event.COMMIT and one.source == "node0.0"]
    took_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(times)]
    return {"longest_ms": max(took_ms), "median_ms": median(took_ms), "lost_steps": outcome.lost_steps}


def main() -> None:
    """Measure, print a line a run, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Harness("kubernetes", directory) as harness:
        departure(harness)  # pods are cold
        measured = [departure(harness) for _ in range(arguments.runs)]
    for one in measured:
        print("longest {longest_ms:6.1f} ms, median {median_ms:5.1f} ms, lost steps {lost_steps}".format(**one))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
