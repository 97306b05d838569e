"""Whether ``chaoskit compare`` finds planted regressions:
``python -m benchmarks.verdicts.versions [--results DIR] [--quick]``.

A repository holds a copy of chaoskit and a test that kills a rank of a sharded job. A process of its own makes branches
of it, some with a sleep in the runtime or in the job, and keeps to itself which. The comparison sees their names, which
are drawn. Afterwards its findings are laid beside what was planted.
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
    """A copy of chaoskit, as it lies when it is installed, and the test."""
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
    """Medians of the numbers of ten runs."""
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
    """Make a branch for each, in an order that is drawn, and write which is which to a file."""
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
        (directory / "NOTES").write_text(name)  # what changes nothing is a version, too
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
    """Plant, compare, and lay both beside each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=Path, help="a directory for versions.json and versions.md"
    )
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
        found = {}
        for version in random.sample(versions := branches(directory), len(versions)):
            found[version] = compare(directory, version)
            told = [
                f"{one['change']} {one['phase']}"
                for one in found[version]["findings"]
                if one["unit"] == "s"
            ]
            print(f"{version}: {found[version]['took_s']:.0f} s: {', '.join(told)}", flush=True)
        named = json.loads(key.read_text())
        rows = [
            {"planted": kind, "version": version, **found[version]}
            for version, kind in named.items()
        ]
    lines = page(rows)
    print("\n".join(lines))
    if arguments.results:
        (arguments.results / "versions.json").write_text(json.dumps(rows, indent=1) + "\n")
        (arguments.results / "versions.md").write_text("\n".join([*lines, ""]))


def branches(directory: Path) -> list[str]:
    command = ["git", "-C", str(directory), "branch", "--format=%(refname:short)"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted({*done.stdout.split()} - {"base"})


def page(rows: list[dict[str, Any]]) -> list[str]:
    """Two tables: what became of each number, and which phase was named."""
    took = [row["took_s"] for row in rows]
    head = (
        f"{len(rows)} versions of chaoskit, each compared with the one that they were made of: `chaoskit compare base "
        "VERSION test_kill.py --number NUMBER` (a rank of a sharded job is killed; two ranks, two cores); "
        f"{median(took):.0f} s each, {max(took):.0f} s at most. A sleep makes the planted number longer by "
        f"{PLANTED:.0%}. Written by `python -m benchmarks.verdicts.versions --results benchmarks/results`."
    )
    lines = [
        "# Whether planted regressions are found",
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
        for name, of_kind in {**groups, "nothing": ("nothing",)}.items():
            mine = [
                row
                for row in rows
                if row["planted"] in of_kind and row["version"].startswith(f"{number}-")
            ]
            counts = Counter(change_of(row, number) for row in mine)
            cells = [
                str(counts[change] or "")
                for change in ("regressed", "undecided", "unchanged", "better")
            ]
            if mine:
                lines.append(f"| {number} | {name} | {len(mine)} | {' | '.join(cells)} |")
    named = [*PHASES, "whole", ""]
    lines += ["", "Which phase was named where a recovery got longer:", ""]
    lines += [
        f"| planted | {' | '.join(name or 'none' for name in named)} |",
        f"|---|{'---|' * len(named)}",
    ]
    for kind in (*PHASES, "whole"):
        counts = Counter(phase_of(row) for row in rows if row["planted"] == kind)
        if counts:
            lines.append(f"| {kind} | {' | '.join(str(counts[name] or '') for name in named)} |")
    return lines


def change_of(row: Mapping[str, Any], number: str) -> str:
    return next(
        (str(one["change"]) for one in row["findings"] if one["metric"] == number), "not measured"
    )


def phase_of(row: Mapping[str, Any]) -> str:
    return next((str(one["phase"]) for one in row["findings"] if one["metric"] == "recovery"), "")


if __name__ == "__main__":
    main()
