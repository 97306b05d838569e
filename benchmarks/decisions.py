"""False alarms and power of a comparison: ``python benchmarks/decisions.py [--runs N] [--tries N] [--results DIR]``.

Recoveries from a SIGKILL are recorded in several sessions, each a process of its own with a warm start of its own. Then
pairs of sessions are drawn, runs are drawn from both with replacement, and some change is planted in the later one: its
recoveries are longer by a share, or recoveries *and* steps are, as on a slow day. What :func:`chaoskit.history.compare`
says of each pair is counted. A change of 0 that is called regressed is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.history.compare import Change, compare
from chaoskit.history.record import Metric, RunRecord, new_id
from chaoskit.history.session import read

SESSIONS = 6
SIZES = (7, 14, 28)
#: What is planted: of the recovery alone, and of everything.
PLANTED = ((0.0, 0.0), (0.10, 0.0), (0.25, 0.0), (0.0, 0.15), (0.25, 0.15))
DECIDING = ("recovery / step", "recovery")
ORDER = (Change.REGRESSED, Change.BETTER, Change.UNDECIDED, Change.INCOMPARABLE, Change.UNCHANGED)
TEST = """
from faults import Kill

def test_kill(chaos):
    chaos.run("gpt", nodes=2, steps=24, options={"size": "tiny"}, faults=[Kill(rank=1, at_step=14)], twin=False)
"""


def record(runs: int) -> list[list[RunRecord]]:
    """The runs of each session that recovered."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "test_decisions.py").write_text(TEST)
        (Path(directory) / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
        for number in range(SESSIONS):
            file = Path(directory) / f"{number}.jsonl"
            options = ["-q", "-p", "no:cacheprovider", "--chaos-repeats", str(runs), "--chaos-save", str(file)]
            subprocess.run([sys.executable, "-m", "pytest", *options], cwd=directory, check=True)
            found.append(read(str(file)).runs)
    return found


def changed(run: RunRecord, recovery: float, everything: float) -> RunRecord:
    """The same run, slower."""
    by = {"recovery": (1 + recovery) * (1 + everything), "step": 1 + everything, "bound": 1 + everything}
    metrics = {
        name: Metric(metric.value * by.get(name, 1.0), metric.unit, metric.better)
        for name, metric in run.metrics.items()
    }
    return msgspec.structs.replace(run, run_id=new_id(), metrics=metrics)


def decide(
    sessions: Sequence[Sequence[RunRecord]], size: int, planted: tuple[float, float], tries: int
) -> dict[str, float]:
    """The share of comparisons of each kind: by the first of :data:`ORDER` that a duration is found to be."""
    chance, found = random.Random(f"{size}{planted}"), Counter[Change]()
    for _ in range(tries):
        before, after = chance.sample(sessions, 2)
        findings = compare(
            [msgspec.structs.replace(run, run_id=new_id()) for run in chance.choices(before, k=size)],
            [changed(run, *planted) for run in chance.choices(after, k=size)],
        ).findings
        changes = {one.change for one in findings if one.metric in DECIDING}
        found[next(change for change in ORDER if change in changes)] += 1
    return {change.value: found[change] / tries for change in ORDER if found[change]}


def main() -> None:
    """Record, decide, and print a line for each size and change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="of each session")
    parser.add_argument("--tries", type=int, default=2000, help="comparisons of each kind")
    parser.add_argument("--results", type=Path, help="a directory for decisions.json and decisions.md")
    arguments = parser.parse_args()
    sessions = record(arguments.runs)
    rows = []
    for size in SIZES:
        for planted in PLANTED:
            shares = decide(sessions, size, planted, arguments.tries)
            rows.append({"runs": size, "recovery": planted[0], "everything": planted[1], "shares": shares})
            told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
            print(f"{size} a side, recovery +{planted[0]:.0%}, everything +{planted[1]:.0%}: {told}", flush=True)
    if arguments.results:
        _write(arguments.results, sessions, rows)


def _write(directory: Path, sessions: Sequence[Sequence[RunRecord]], rows: Sequence[dict[str, object]]) -> None:
    names = ("recovery", "step", "bound")
    samples = [[[round(run.metrics[name].value, 6) for name in names] for run in session] for session in sessions]
    machine = sessions[0][0].machine
    told = {"machine": machine, "samples_s": {"of": names, "sessions": samples}, "decisions": rows}
    (directory / "decisions.json").write_text(json.dumps(told, indent=1) + "\n")
    kinds = [change.value for change in ORDER]
    of = f"{sum(map(len, sessions))} recoveries of {len(sessions)} sessions on {machine}, drawn in pairs of sessions."
    lines = [
        "# How often a comparison is right",
        "",
        f"{of} Written by `python benchmarks/decisions.py --results benchmarks/results`.",
        "",
        f"| runs a side | recovery | everything | {' | '.join(kinds)} |",
        f"|---|---|---|{'---|' * len(kinds)}",
    ]
    for row in rows:
        shares = row["shares"]
        assert isinstance(shares, dict)
        cells = [f"{shares.get(kind, 0):.1%}" for kind in kinds]
        lines.append(f"| {row['runs']} | +{row['recovery']:.0%} | +{row['everything']:.0%} | {' | '.join(cells)} |")
    (directory / "decisions.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
