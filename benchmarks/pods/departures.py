"""Measure departures of pods:
``python -m benchmarks.pods.departures [--coordinator] [--runs N] [--json FILE]``.

The pod of one of three ranks is evicted with time to end, as by a drain, under an elastic policy;
or the pod of the coordinator is deleted. Each run gives the longest and the median time between two
commits of a rank that stays, the steps lost, and the time without a coordinator. Cluster, image and
namespace: the variables of ``docs/kubernetes.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.experiment.harness import Harness
from chaoskit.journal import read_journals
from chaoskit.vocabulary import Event, Verdict
from faults import DeleteCoordinatorPod, EvictPod, Fault

JOB = f"{Path(__file__).parents[2] / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
STEPS, AT, STEP_S, GRACE_S = 150, 40, 0.03, 20


def departure(harness: Harness, fault: Fault) -> dict[str, float]:
    """Run with ``fault`` and return its figures. Raises RuntimeError if the run did not pass."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3) if isinstance(fault, EvictPod) else None
    outcome = harness.run(
        JOB,
        nodes=3,
        steps=STEPS,
        options={"step_s": STEP_S},
        faults=[fault],
        twin=False,
        elastic=policy,
    )
    if outcome.verdict is not Verdict.PASSED:
        raise RuntimeError("; ".join(outcome.reasons))
    records = read_journals(Path(outcome.directory) / "journal")
    commits = [record for record in records if record.event == Event.COMMIT]
    (stays, _), *_ = Counter(record.source for record in commits).most_common()
    times = [record.t_ns for record in commits if record.source == stays]
    took_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(times)]
    injected_ns = next(record.t_ns for record in records if record.event == Event.INJECTED)
    resumed_ns = next(
        (record.t_ns for record in records if record.event == Event.RESUMED), injected_ns
    )
    return {
        "longest_ms": max(took_ms),
        "median_ms": median(took_ms),
        "lost_steps": outcome.lost_steps,
        "without_coordinator_ms": (resumed_ns - injected_ns) / 1e6,
    }


def main() -> None:
    """Measure, print a line for each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", action="store_true", help="delete its pod instead")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    evicted = EvictPod(rank=1, at_step=AT, grace_s=GRACE_S)
    fault: Fault = DeleteCoordinatorPod(at_step=AT) if arguments.coordinator else evicted
    with tempfile.TemporaryDirectory() as directory, Harness("kubernetes", directory) as harness:
        departure(harness, fault)  # not counted: pods are cold
        measured = [departure(harness, fault) for _ in range(arguments.runs)]
    for figures in measured:
        print(
            "longest {longest_ms:6.1f} ms, median {median_ms:5.1f} ms, lost steps {lost_steps}, "
            "without a coordinator {without_coordinator_ms:6.1f} ms".format(**figures)
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
