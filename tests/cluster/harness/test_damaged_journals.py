"""Journals that were damaged after the run: no damage stops the judge, and no damage that matters
passes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.examples import examples

from chaoskit import Chaos, Verdict, judge_directory
from chaoskit.journal import load_journals
from faults import BitFlip, Fault, Hang, Kill, KillCoordinator, KillNode, NaN

TINY: dict[str, Any] = {"size": "tiny"}
RUNS: dict[str, tuple[str, tuple[Fault, ...], dict[str, Any]]] = {
    "unbroken": ("gpt", (), {}),
    "kill": ("gpt", (Kill(rank=1, at_step=3),), {}),
    "two kills": (
        "gpt",
        (Kill(rank=0, at_step=3, phase="optimizer"), Kill(rank=2, at_step=6)),
        {"spares": 2},
    ),
    "fast": ("gpt", (Kill(rank=1, at_step=3),), {"reduction": "fast"}),
    "hang": ("gpt", (Hang(rank=1, at_step=4),), {}),
    "node": ("gpt", (KillNode(rank=1, at_step=4),), {}),
    "coordinator": ("gpt", (KillCoordinator(rank=0, at_step=4),), {}),
    "nan": ("gpt", (NaN(rank=1, at_step=4, parameter="head.weight"),), {}),
    "bit": ("gpt", (BitFlip(rank=1, at_step=4, parameter="head.weight", bit=20),), {}),
    "sharded": ("fsdp", (Kill(rank=1, at_step=4),), {"shards": 3, "options": TINY | {"batch": 12}}),
}
#: Events that a verdict is computed from: a run must not pass if such a line cannot be read.
#: The last contribution of a lost rank is not needed.
#: Nor is the readiness of a spare that never had a rank.
NEEDED = {
    "commit",
    "evidence",
    "finished",
    "hook_stopped",
    "injected",
    "job_ended",
    "plan",
    "run_ended",
}


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def events_of(lines: list[bytes]) -> set[str]:
    return {json.loads(line)["event"] for line in lines}


def damage(path: Path, generator: Random) -> tuple[str, set[str]]:
    """Damage one file; return the kind of damage, and the events of the records that cannot be read
    any more.
    """
    data = path.read_bytes()
    lines = lines_of(data)
    place = generator.randrange(len(lines))
    how = generator.choice(["delete", "truncate", "duplicate", "flip"])
    if how == "duplicate":
        lines.insert(generator.randrange(len(lines) + 1), lines[place])
        path.write_bytes(b"".join(lines))
        return how, set()
    if how == "delete":
        path.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
        return how, events_of([lines[place]])
    if how == "truncate":
        at = generator.randrange(len(data))
        path.write_bytes(data[:at])
        whole = (
            len(lines_of(data[:at] + b"\n"))
            if data[at : at + 1] == b"\n"
            else data[:at].count(b"\n")
        )
        return how, events_of(lines[whole:])
    at = generator.randrange(len(data))
    path.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
    begun = len(lines_of(data[: at + 1])) - 1
    return how, events_of([lines[begun]])


@pytest.mark.costly
@pytest.mark.parametrize("name", RUNS)
def test_no_damage_that_matters_passes(chaos: Chaos, name: str, tmp_path: Path) -> None:
    """A repeated line is dropped; a line that cannot be read makes its part of the verdict unknown."""
    job, faults, more = RUNS[name]
    plan: dict[str, Any] = {"nodes": 3, "shards": 4, "steps": 10, "options": TINY, **more}
    outcome = chaos.run(job, faults=faults, **plan)
    files = sorted((Path(outcome.directory) / "journal").glob("*.jsonl"))
    for number in range(examples(200)):
        generator = Random(f"{name}/{number}")
        copy = tmp_path / "copy"
        shutil.copytree(outcome.directory, copy, ignore=shutil.ignore_patterns("log"))
        path = copy / "journal" / generator.choice(files).name
        how, lost = damage(path, generator)
        verdict = judge_directory(copy).verdict
        if how == "duplicate":
            assert verdict == Verdict.PASSED, (number, path)
            assert (
                sum(file.repeated for file in load_journals(copy / "journal").files.values()) == 1
            )
        elif lost & NEEDED:
            assert verdict != Verdict.PASSED, (number, path, how, lost)
        shutil.rmtree(copy)
