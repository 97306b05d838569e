"""Measure false alarms and power of comparisons:
``python -m benchmarks.verdicts.decisions [--runs N] [--tries N] [--results DIR]``.

Recoveries from a SIGKILL are recorded in several sessions, each in a process of its own with its
own warm start. Then pairs of sessions are drawn, and runs are drawn from both with replacement. A
change is planted in the later session: its recoveries are longer by a share, or recoveries *and*
steps are, as on a slow day. The results of :func:`chaoskit.history.compare` for these pairs are
counted. A change of 0 that is called regressed is a false alarm.

For versions that run in turns (:mod:`chaoskit.versions`), blocks of four consecutive runs of one
session are drawn with replacement, so that the effect of a run on the next one is kept. Both
versions run in that session, which may get slower meanwhile. The option ``--samples FILE`` uses the
recordings of an earlier call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.results import write
from chaoskit.history.compare import compare
from chaoskit.history.finding import NumberChange
from chaoskit.history.record import Metric, RunRecord, new_id
from chaoskit.history.session import read
from chaoskit.versions.looks import LOOKS
from chaoskit.versions.schedule import ArmReport, Side, VersionSchedule
from chaoskit.vocabulary import Verdict

SESSIONS = 6
SIZES = (7, 14, 28)
#: What is planted: of the recovery alone, and of everything.
PLANTED = ((0.0, 0.0), (0.10, 0.0), (0.25, 0.0), (0.0, 0.15), (0.25, 0.15))
#: The same of versions in turns: of the recovery, and how much slower the session gets.
TURNS = ((0.0, 0.0), (0.10, 0.0), (0.15, 0.0), (0.25, 0.0), (0.0, 0.15), (0.25, 0.15))
DECIDING = ("recovery / step", "recovery")
ORDER = (
    NumberChange.REGRESSED,
    NumberChange.BETTER,
    NumberChange.UNDECIDED,
    NumberChange.INCOMPARABLE,
    NumberChange.UNCHANGED,
)
TEST = """
from faults import Kill

def test_kill(chaos):
    chaos.run("gpt", nodes=2, steps=24, options={"size": "tiny"}, faults=[Kill(rank=1, at_step=14)], twin=False)
"""


def record(runs: int) -> list[list[RunRecord]]:
    """Run the sessions; return, for each, the runs that recovered."""
    sessions = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "test_decisions.py").write_text(TEST)
        (Path(directory) / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
        for number in range(SESSIONS):
            file = Path(directory) / f"{number}.jsonl"
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                "--chaos-repeats",
                str(runs),
                "--chaos-save",
                str(file),
            ]
            subprocess.run([sys.executable, "-m", "pytest", *options], cwd=directory, check=True)
            sessions.append(read(str(file)).runs)
    return sessions


def changed(run: RunRecord, recovery: float, everything: float) -> RunRecord:
    """Return ``run`` with longer durations.

    Recoveries grow by the shares ``recovery`` and ``everything``, and all other durations by
    ``everything``.
    """
    by = {
        "recovery": (1 + recovery) * (1 + everything),
        "step": 1 + everything,
        "bound": 1 + everything,
    }
    metrics = {
        name: Metric(metric.value * by.get(name, 1.0), metric.unit, metric.better)
        for name, metric in run.metrics.items()
    }
    return msgspec.structs.replace(run, run_id=new_id(), metrics=metrics)


def decide(
    sessions: Sequence[Sequence[RunRecord]], size: int, planted: tuple[float, float], tries: int
) -> dict[str, float]:
    """Return the share of comparisons with each change; a comparison counts as the first of
    :data:`ORDER` that it finds.
    """
    chance, counts = random.Random(f"{size}{planted}"), Counter[NumberChange]()
    for _ in range(tries):
        before, after = chance.sample(sessions, 2)
        findings = compare(
            [
                msgspec.structs.replace(run, run_id=new_id())
                for run in chance.choices(before, k=size)
            ],
            [changed(run, *planted) for run in chance.choices(after, k=size)],
        ).findings
        changes = {finding.change for finding in findings if finding.metric in DECIDING}
        counts[next(change for change in ORDER if change in changes)] += 1
    return {change.value: counts[change] / tries for change in ORDER if counts[change]}


def in_turns(
    sessions: Sequence[Sequence[RunRecord]], planted: float, drift: float, tries: int
) -> dict[str, float]:
    """Return the shares of changes that comparisons in turns find in recoveries, and the mean
    number of runs a side.
    """
    chance, counts, runs = random.Random(f"{planted}{drift}"), Counter[NumberChange](), 0
    for _ in range(tries):
        values = stream(chance, chance.choice(sessions), drift)
        schedule = VersionSchedule(["test_kill"], numbers=("recovery",))
        while turn := schedule.next_turn():
            slower = 1 + planted if turn.side is Side.AFTER else 1.0
            schedule.take(turn, ArmReport([changed(next(values), slower - 1, 0.0)]))
        (finding,) = (finding for finding in schedule.findings if finding.metric == "recovery")
        counts[finding.change] += 1
        runs += schedule.counted_runs("test_kill")
    return {change.value: counts[change] / tries for change in ORDER if counts[change]} | {
        "runs": runs / tries
    }


def stream(
    chance: random.Random, session: Sequence[RunRecord], drift: float
) -> Iterator[RunRecord]:
    """Yield runs of a session in blocks of four, from a machine that gets slower by ``drift``."""
    for place in itertools.count():
        if place % 4 == 0:
            start = chance.randrange(len(session) - 3)
        yield changed(
            session[start + place % 4], 0.0, drift * min(1.0, place / (2 * LOOKS[-1].runs))
        )


def main() -> None:
    """Record, decide, and print a line for each size and change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="of each session")
    parser.add_argument("--tries", type=int, default=2000, help="comparisons of each kind")
    parser.add_argument(
        "--samples", type=Path, help="a samples/decisions.json, instead of recording anew"
    )
    parser.add_argument("--results", type=Path, help="a directory for decisions.json")
    arguments = parser.parse_args()
    sessions = recorded(arguments.samples) if arguments.samples else record(arguments.runs)
    rows = []
    for size in SIZES:
        for planted in PLANTED:
            shares = decide(sessions, size, planted, arguments.tries)
            rows.append(
                {"runs": size, "recovery": planted[0], "everything": planted[1], "shares": shares}
            )
            text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
            print(
                f"{size} a side, recovery +{planted[0]:.0%}, everything +{planted[1]:.0%}: {text}",
                flush=True,
            )
    turns = []
    for planted, drift in TURNS:
        shares = in_turns(sessions, planted, drift, arguments.tries)
        turns.append({"recovery": planted, "drift": drift, "shares": shares})
        text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != "runs")
        print(
            f"in turns, +{planted:.0%}, drift {drift:.0%}: {text}; {shares['runs']:.1f} runs a side",
            flush=True,
        )
    if arguments.results:
        _write(arguments.results, sessions, rows, turns)


def recorded(path: Path) -> list[list[RunRecord]]:
    """Return the runs that an earlier call recorded."""
    stored = json.loads(path.read_text())
    names = stored["samples_s"]["of"]
    return [
        [_run(dict(zip(names, values, strict=True)), stored["machine"]) for values in session]
        for session in stored["samples_s"]["sessions"]
    ]


def _run(values_s: dict[str, float], machine: str) -> RunRecord:
    metrics = {name: Metric(duration_s, "s", "lower") for name, duration_s in values_s.items()}
    return RunRecord(
        run_id=new_id(),
        session=new_id(),
        started_unix_ns=0,
        series="kill",
        title="test_kill",
        machine=machine,
        seed=0,
        verdict=Verdict.PASSED,
        stack="chaoskit",
        faults=["Kill"],
        metrics={"recovered": Metric(1.0, "count", "higher"), **metrics},
    )


def _write(
    directory: Path,
    sessions: Sequence[Sequence[RunRecord]],
    rows: Sequence[dict[str, Any]],
    turns: Sequence[dict[str, Any]],
) -> None:
    names = ("recovery", "step", "bound")
    samples_s = [
        [[round(run.metrics[name].value, 6) for name in names] for run in session]
        for session in sessions
    ]
    machine = sessions[0][0].machine
    shares = {"decisions": rows, "in_turns": turns}
    summary = {
        "machine": machine,
        "sessions": len(sessions),
        "recoveries": sum(map(len, sessions)),
        **shares,
    }
    samples = {"machine": machine, "samples_s": {"of": names, "sessions": samples_s}, **shares}
    write(directory, "decisions", summary, json.dumps(samples, indent=1))


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the section of ``decisions.json`` on the page of results, without its heading."""
    kinds = [change.value for change in ORDER]
    head = (
        f"{summary['recoveries']} recoveries of {summary['sessions']} sessions on {summary['machine']}, drawn in pairs "
        "of sessions. Written by `python -m benchmarks.verdicts.decisions --results benchmarks/results`."
    )
    lines = [
        "How often a comparison is right.",
        "",
        head,
        "",
        f"| runs a side | recovery | everything | {' | '.join(kinds)} |",
        f"|---|---|---|{'---|' * len(kinds)}",
    ]
    for row in summary["decisions"]:
        shares = row["shares"]
        cells = [f"{shares.get(kind, 0):.1%}" for kind in kinds]
        lines.append(
            f"| {row['runs']} | +{row['recovery']:.0%} | +{row['everything']:.0%} | {' | '.join(cells)} |"
        )
    lines += [
        "",
        "Versions in turns: both in one session, which gets slower by the drift while they run.",
        "",
        "| recovery | drift | regressed | unchanged | undecided | better | runs a side |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary["in_turns"]:
        shares = row["shares"]
        cells = [
            f"{shares.get(kind, 0):.1%}"
            for kind in ("regressed", "unchanged", "undecided", "better")
        ]
        lines.append(
            f"| +{row['recovery']:.0%} | {row['drift']:.0%} | {' | '.join(cells)} | {shares['runs']:.1f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
