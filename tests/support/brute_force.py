"""A second reader of journals, as simple as can be: raw JSON and loops, and no code of chaoskit."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Told(NamedTuple):
    """Seconds of each recovery, in the order of the faults; steps that were lost; productive time / wall time."""

    recoveries_s: list[float]
    lost_steps: int
    goodput: float


def read(directory: Path) -> Told:
    lines = [
        line for path in sorted((directory / "journal").glob("*.jsonl")) for line in path.open()
    ]
    records = sorted((json.loads(line) for line in lines), key=lambda one: one["t_ns"])
    commits: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for one in records:
        if one["event"] == "commit":
            commits[one["step"]][one["generation"]].append(one)
    ends = {
        step: max(each["t_ns"] for each in made[max(made)])
        for step, made in sorted(commits.items())
    }
    return Told(
        recoveries(records, commits, ends), lost(records, commits), goodput(records, commits, ends)
    )


def recoveries(records: list[dict[str, Any]], commits: Any, ends: dict[int, int]) -> list[float]:
    """From the last act on what was lost to the end of the first step of the membership that the loss led to."""
    acts: dict[str, int] = {}
    found: dict[int, float] = {}  # by act: a node is lost once, however many workers it had
    for number, one in enumerate(records):
        if one["event"] == "injected":
            acts |= dict.fromkeys([one["worker"], *one["nodes"]], one["t_ns"])
        if one["event"] != "detected" or one["rank"] is None:
            continue
        worker = one["worker"]
        act_ns = max(
            (acts[name] for name in (worker, worker.split(".")[0]) if name in acts), default=None
        )
        plans = [later for later in records[number:] if later["event"] == "plan" and later["abort"]]
        good = [
            ends[step] for step in ends if plans and max(commits[step]) >= plans[0]["generation"]
        ]
        if act_ns is not None and good:
            found.setdefault(act_ns, (good[0] - act_ns) / 1e9)
    return list(found.values())


def lost(records: list[dict[str, Any]], commits: Any) -> int:
    """Steps that were committed and computed again; the last one of a membership was in flight if no rank kept it."""
    newest: dict[str, int] = defaultdict(int)
    for one in records:
        if one["event"] in ("commit", "reduce", "regrouped"):
            newest[one["by"]] = max(newest[one["by"]], one["generation"])
    again: dict[int, list[int]] = defaultdict(list)
    for step, made in sorted(commits.items()):
        if len(made) > 1:
            again[sorted(made)[-2]].append(step)
    count = 0
    for steps in again.values():
        for step in steps:
            before = [one for made in sorted(commits[step])[:-1] for one in commits[step][made]]
            kept = any(newest[one["by"]] >= max(commits[step]) for one in before)
            count += step != steps[-1] or kept
    return count


def goodput(records: list[dict[str, Any]], commits: Any, ends: dict[int, int]) -> float:
    """Time of the steps that live on; of the first one of a membership as much as the steps before it usually took."""
    generations = {step: max(made) for step, made in commits.items()}
    steady = [
        ends[step] - ends[step - 1]
        for step in ends
        if generations.get(step - 1) == generations[step]
    ]
    first_ns = next(one["t_ns"] for one in records if one["event"] == "settled")
    total_ns = min(ends[min(ends)] - first_ns, 10**12)
    for step in sorted(ends)[1:]:
        spent_ns = ends[step] - ends[step - 1]
        total_ns += (
            spent_ns
            if generations[step] == generations[step - 1]
            else min(spent_ns, int(median(steady)))
        )
    stalls_ms = sum(
        max(one.get("stall_ms", 0.0) for one in made[max(made)]) for made in commits.values()
    )
    start_ns, end_ns = (
        next(one["t_ns"] for one in records if one["event"] == name)
        for name in ("started", "run_ended")
    )
    return (total_ns - stalls_ms * 1e6) / (end_ns - start_ns)
