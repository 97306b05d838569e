"""Check that ``chaoskit compare`` finds planted regressions:
``python -m benchmarks.verdicts.versions [--results DIR] [--quick]``.

A repository holds a copy of chaoskit and a test that kills a rank of a sharded job. A separate
process makes branches of it, some with a sleep in the runtime or in the job, and writes the key to
a file. The comparison gets only the random names of the branches. Afterwards its findings are
compared with the key.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.results import write
from chaoskit.history.session import read

ROOT = Path(__file__).resolve().parents[2]
PLANTED = 0.25
#: Every step waits so long: else copies of the state are not made in time, and whether a step is lost is luck.
PACE_S = 0.04
TEST = """
from faults import Kill

def test_kill(chaos):
    chaos.run("fsdp", nodes=2, steps=11, options={"size": "tiny"}, faults=[Kill(rank=1, at_step=6)], twin=False)
"""
#: Where code of each phase of a recovery runs: file, the line before which a sleep is put, and how the sleep begins.
PLACES = {
    "detected": ("chaoskit/agent/agent.py", "        if charge.", "detected_ns += {ns}; "),
    "quiesced": (
        "chaoskit/runtime/step/sharded_trainer.py",
        "            worker.journal.write(Event.QUIESCED",
        "",
    ),
    "regrouped": (
        "chaoskit/runtime/group/regroup.py",
        "            self._journal.write(Event.REGROUPED",
        "",
    ),
    "restored": (
        "chaoskit/runtime/step/sharded_trainer.py",
        "        for snapshot in restorer.read:",
        "",
    ),
    "first_good_step": (
        "chaoskit/runtime/step/sharded_trainer.py",
        "        worker.journal.write(Event.ADOPT, step=restorer",
        "",
    ),
    "step": ("chaoskit/fixtures/jobs/fsdp.py", "            goal.pace()", ""),
}
PHASES = tuple(PLACES)[:5]
#: What is planted, and how often, where a number is compared: a phase that makes a recovery longer by a quarter; all
#: phases, each by a quarter; a number that is longer by a quarter itself; nothing.
PLAN = {
    "recovery": {**dict.fromkeys(PHASES, 2), "whole": 3, "nothing": 10},
    "step": {"step": 3, "nothing": 3},
    "recovery.restored": {"restore": 3, "nothing": 3},
}
QUICK = {"recovery": {"restored": 1, "nothing": 1}, "step": {"step": 1}}


def git(repository: Path, *arguments: str) -> None:
    author = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    subprocess.run(
        ["git", "-C", str(repository), *author, *arguments], check=True, capture_output=True
    )


def make_repository(directory: Path) -> None:
    """Create a git repository with an installed copy of chaoskit and the test."""
    ignore = shutil.ignore_patterns("__pycache__")
    for source, target in (
        ("chaoskit", "chaoskit"),
        ("faults", "faults"),
        ("fixtures", "chaoskit/fixtures"),
    ):
        shutil.copytree(ROOT / source, directory / target, ignore=ignore, dirs_exist_ok=True)
    put(directory, "step", PACE_S)
    (directory / "test_kill.py").write_text(TEST)
    (directory / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
    (directory / ".gitignore").write_text("__pycache__\n")
    git(directory, "init", "--quiet", "--initial-branch", "base")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "base")


def measure(directory: Path) -> dict[str, float]:
    """Return the medians of the numbers of ten runs."""
    save = directory.parent / "base.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--chaos-repeats=10",
        "--chaos-save",
        str(save),
        "test_kill.py",
    ]
    subprocess.run(
        command, cwd=directory, check=True, capture_output=True, env=environment(directory)
    )
    runs = read(str(save)).runs
    names = {name for run in runs for name in run.metrics}
    return {
        name: median(run.metrics[name].value for run in runs if name in run.metrics)
        for name in names
    }


def environment(directory: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(directory)}


def plant(
    directory: Path, numbers: Mapping[str, float], plan: Mapping[str, Mapping[str, int]], key: Path
) -> None:
    """Create a branch for each planted change, in random order, and write the kind of each to the
    file ``key``.
    """
    kinds = [
        (number, kind)
        for number, of in plan.items()
        for kind, count in of.items()
        for _ in range(count)
    ]
    random.SystemRandom().shuffle(kinds)
    named = {}
    for number, kind in kinds:
        name = f"{number}-{secrets.token_hex(4)}"
        git(directory, "checkout", "--quiet", "-b", name, "base")
        for place, seconds in sleeps(kind, numbers):
            put(directory, place, seconds)
        (directory / "NOTES").write_text(name)  # a version without a change is compared, too
        git(directory, "add", "--all")
        git(directory, "commit", "--quiet", "--message", name)
        named[name] = kind
    git(directory, "checkout", "--quiet", "base")
    key.write_text(json.dumps(named))


def sleeps(kind: str, numbers: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    if kind == "whole":
        return [(phase, PLANTED * numbers[f"recovery.{phase}"]) for phase in PHASES]
    if kind == "step":
        return [("step", PLANTED * numbers["step"])]
    if kind == "restore":
        return [("restored", PLANTED * numbers["recovery.restored"])]
    return [] if kind == "nothing" else [(kind, PLANTED * numbers["recovery"])]


def put(directory: Path, place: str, seconds: float) -> None:
    name, before, more = PLACES[place]
    path = directory / name
    text = path.read_text()
    if place == "detected":  # its moment is an argument
        before = "        self._tell(WorkerLost(charge.name"
    assert text.count(before) == 1, (place, text.count(before))
    indent = " " * (len(before) - len(before.lstrip()))
    line = f"{indent}{more.format(ns=round(seconds * 1e9))}__import__('time').sleep({seconds})\n"
    path.write_text(text.replace(before, line + before))


def compare(directory: Path, version: str) -> dict[str, Any]:
    number = version.rpartition("-")[0]
    command = [
        sys.executable,
        "-m",
        "chaoskit",
        "compare",
        "base",
        version,
        "test_kill.py",
        "--number",
        number,
        "--json",
    ]
    began = time.monotonic()
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{version}: {done.returncode}: {done.stderr}")
    return json.loads(done.stdout) | {
        "took_s": time.monotonic() - began,
        "told": done.stderr.splitlines(),
    }


def main() -> None:
    """Plant changes, compare the versions, and print the findings beside the changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="a directory for versions.json")
    parser.add_argument("--quick", action="store_true", help="three versions only")
    parser.add_argument(
        "--plant", nargs=2, type=Path, metavar=("NUMBERS", "KEY"), help=argparse.SUPPRESS
    )
    parser.add_argument("--in", dest="directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else PLAN
    if arguments.plant:
        numbers, key = arguments.plant
        plant(arguments.directory, json.loads(numbers.read_text()), plan, key)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory, numbers, key = (
            Path(scratch) / name for name in ("project", "numbers.json", "key.json")
        )
        directory.mkdir()
        make_repository(directory)
        numbers.write_text(json.dumps(measure(directory)))
        command = [
            sys.executable,
            "-m",
            "benchmarks.verdicts.versions",
            "--plant",
            str(numbers),
            str(key),
            "--in",
            str(directory),
        ]
        subprocess.run([*command, *(["--quick"] if arguments.quick else [])], check=True)
        comparisons = {}
        for version in random.sample(versions := branches(directory), len(versions)):
            comparisons[version] = compare(directory, version)
            changes = [
                f"{finding['change']} {finding['phase']}"
                for finding in comparisons[version]["findings"]
                if finding["unit"] == "s"
            ]
            print(
                f"{version}: {comparisons[version]['took_s']:.0f} s: {', '.join(changes)}",
                flush=True,
            )
        named = json.loads(key.read_text())
        rows = [
            {"planted": kind, "version": version, **comparisons[version]}
            for version, kind in named.items()
        ]
    summary = summarize(rows)
    print(render_markdown(summary))
    if arguments.results:
        write(arguments.results, "versions", summary, json.dumps(rows, indent=1))


def branches(directory: Path) -> list[str]:
    command = ["git", "-C", str(directory), "branch", "--format=%(refname:short)"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted({*done.stdout.split()} - {"base"})


def summarize(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the comparison of each version found for the number that it was planted for."""
    comparisons = []
    for row in rows:
        number = row["version"].rpartition("-")[0]
        comparisons.append(
            {
                "number": number,
                "planted": row["planted"],
                "change": finding(row, number).get("change", "not measured"),
                "phase": finding(row, "recovery").get("phase", ""),
                "took_s": round(row["took_s"], 1),
            }
        )
    return {"comparisons": comparisons}


def finding(row: Mapping[str, Any], number: str) -> Mapping[str, Any]:
    """Return the finding about ``number``, or nothing if the comparison has none."""
    return next((finding for finding in row["findings"] if finding["metric"] == number), {})


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the section of ``versions.json`` on the page of results, without its heading."""
    comparisons = summary["comparisons"]
    took_s = [comparison["took_s"] for comparison in comparisons]
    head = (
        f"{len(comparisons)} versions of chaoskit, each compared with the one that they were made of: `chaoskit "
        "compare base VERSION test_kill.py --number NUMBER` (a rank of a sharded job is killed; two ranks, two cores); "
        f"{median(took_s):.0f} s each, {max(took_s):.0f} s at most. A sleep makes the planted number longer by "
        f"{PLANTED:.0%}. Written by `python -m benchmarks.verdicts.versions --results benchmarks/results`."
    )
    lines = [
        "Whether planted regressions are found.",
        "",
        head,
        "",
        "| number | planted | versions | regressed | undecided | unchanged | better |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, kinds in PLAN.items():
        groups = (
            {"a phase": PHASES, "all phases": ("whole",)}
            if number == "recovery"
            else {"itself": tuple(kinds)[:1]}
        )
        for name, planted in {**groups, "nothing": ("nothing",)}.items():
            changes = Counter(
                comparison["change"]
                for comparison in comparisons
                if comparison["number"] == number and comparison["planted"] in planted
            )
            cells = [
                str(changes[change] or "")
                for change in ("regressed", "undecided", "unchanged", "better")
            ]
            if changes:
                lines.append(f"| {number} | {name} | {changes.total()} | {' | '.join(cells)} |")
    phases = [*PHASES, "whole", ""]
    lines += ["", "Which phase was named where a recovery got longer:", ""]
    lines += [
        f"| planted | {' | '.join(name or 'none' for name in phases)} |",
        f"|---|{'---|' * len(phases)}",
    ]
    for planted_phase in (*PHASES, "whole"):
        counts = Counter(
            comparison["phase"]
            for comparison in comparisons
            if comparison["planted"] == planted_phase
        )
        if counts:
            lines.append(
                f"| {planted_phase} | {' | '.join(str(counts[name] or '') for name in phases)} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
