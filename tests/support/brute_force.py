"""A second reader of journals, as simple as possible: raw JSON and loops, and no code of
chaoskit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class RunFigures(NamedTuple):
    """Figures of a run: seconds of each recovery, in the order of the faults; steps that were lost;
    productive time / wall time.
    """

    recoveries_s: list[float]
    lost_steps: int
    goodput: float


def read(directory: Path) -> RunFigures:
    lines = [
        line for path in sorted((directory / "journal").glob("*.jsonl")) for line in path.open()
    ]
    records = sorted((json.loads(line) for line in lines), key=lambda record: record["t_ns"])
    commits: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["event"] == "commit":
            commits[record["step"]][record["generation"]].append(record)
    ends = {
        step: max(commit["t_ns"] for commit in by_generation[max(by_generation)])
        for step, by_generation in sorted(commits.items())
    }
    return RunFigures(
        recoveries(records, commits, ends), lost(records, commits), goodput(records, commits, ends)
    )


def recoveries(records: list[dict[str, Any]], commits: Any, ends: dict[int, int]) -> list[float]:
    """Return the seconds from the last act on a lost worker to the first step of the membership
    that the loss led to.
    """
    acts: dict[str, int] = {}
    seconds: dict[
        int, float
    ] = {}  # by act: a node is lost once, whatever the number of its workers
    for number, record in enumerate(records):
        if record["event"] == "injected":
            acts |= dict.fromkeys([record["worker"], *record["nodes"]], record["t_ns"])
        if record["event"] != "detected" or record["rank"] is None:
            continue
        worker = record["worker"]
        act_ns = max(
            (acts[name] for name in (worker, worker.split(".")[0]) if name in acts), default=None
        )
        plans = [later for later in records[number:] if later["event"] == "plan" and later["abort"]]
        good = [
            ends[step] for step in ends if plans and max(commits[step]) >= plans[0]["generation"]
        ]
        if act_ns is not None and good:
            seconds.setdefault(act_ns, (good[0] - act_ns) / 1e9)
    return list(seconds.values())


def lost(records: list[dict[str, Any]], commits: Any) -> int:
    """Return the number of steps that were committed and computed again.

    The last step of a membership was in flight if no rank kept it.
    """
    newest: dict[str, int] = defaultdict(int)
    for record in records:
        if record["event"] in ("commit", "reduce", "regrouped"):
            newest[record["by"]] = max(newest[record["by"]], record["generation"])
    again: dict[int, list[int]] = defaultdict(list)
    for step, by_generation in sorted(commits.items()):
        if len(by_generation) > 1:
            again[sorted(by_generation)[-2]].append(step)
    count = 0
    for steps in again.values():
        for step in steps:
            before = [
                commit
                for generation in sorted(commits[step])[:-1]
                for commit in commits[step][generation]
            ]
            kept = any(newest[commit["by"]] >= max(commits[step]) for commit in before)
            count += step != steps[-1] or kept
    return count


def goodput(records: list[dict[str, Any]], commits: Any, ends: dict[int, int]) -> float:
    """Return the share of time of the steps that live on.

    The first step of a membership counts as much as the steps before it usually took.
    """
    generations = {step: max(by_generation) for step, by_generation in commits.items()}
    steady = [
        ends[step] - ends[step - 1]
        for step in ends
        if generations.get(step - 1) == generations[step]
    ]
    first_ns = next(record["t_ns"] for record in records if record["event"] == "settled")
    total_ns = min(ends[min(ends)] - first_ns, 10**12)
    for step in sorted(ends)[1:]:
        spent_ns = ends[step] - ends[step - 1]
        total_ns += (
            spent_ns
            if generations[step] == generations[step - 1]
            else min(spent_ns, int(median(steady)))
        )
    stalls_ms = sum(
        max(commit.get("stall_ms", 0.0) for commit in by_generation[max(by_generation)])
        for by_generation in commits.values()
    )
    start_ns, end_ns = (
        next(record["t_ns"] for record in records if record["event"] == name)
        for name in ("started", "run_ended")
    )
    return (total_ns - stalls_ms * 1e6) / (end_ns - start_ns)
