"""A run with a faulty fault class of a user is an error that names the place, in the output and in
the report.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from chaoskit import Chaos, LogPatterns
from faults import Fault


@dataclass(frozen=True, kw_only=True)
class Own(Fault):
    how: str = ""

    family: ClassVar[str] = "process"
    effect: ClassVar[str] = "none"
    evidence: ClassVar[str] = "none"
    stands_for: ClassVar[str] = "a mistake"
    unlisted: ClassVar[str] = "it is one of a test"
    impact: ClassVar[str] = "none"
    undo: ClassVar[str] = "nothing is left"
    substrates: ClassVar[tuple[str, ...]] = ("local",)
    cost: ClassVar[Any] = "nothing"

    @property
    def from_outside(self) -> bool:
        return True

    async def inject(self, target: Any) -> AsyncIterator[Any]:
        target.release()
        if self.how == "late":
            await target.sleep(0.05)
        if self.how in ("soon", "late"):
            raise KeyError("niceness")  # here
        if self.how == "gone":
            await target.sleep(0.05)
            raise ProcessLookupError(3, "No such process")
        if self.how == "text":
            yield "it was slow"


@pytest.mark.parametrize("how", ["soon", "late", "text", "gone", "nothing"])
def test_command(chaos: Chaos, how: str) -> None:
    command = ["sh", "-c", "for n in 0 1 2 3 4 5 6 7 8 9; do echo step $n; sleep 0.2; done"]
    faults = [Own(rank=0, at_step=2, how=how)]
    chaos.run(command=command, watch=LogPatterns(step=r"step (\\d+)"), faults=faults, twin=False)


@pytest.mark.parametrize("how", ["soon"])
def test_job(chaos: Chaos, how: str) -> None:
    chaos.run("gpt", nodes=2, steps=10, faults=[Own(rank=1, at_step=3, how=how)], twin=False)
"""
LINE = next(number for number, line in enumerate(SUITE.splitlines(), 1) if line.endswith("# here"))


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.parametrize(
    ("test", "status", "told"),
    [
        ("test_command[soon]", 11, f"could not act: KeyError: 'niceness' (PLACE:{LINE})"),
        ("test_command[late]", 11, f"could not act: KeyError: 'niceness' (PLACE:{LINE})"),
        (
            "test_command[text]",
            11,
            "inject yielded 'it was slow', which is not a faults.evidence.Evidence (PLACE:",
        ),
        (
            "test_command[gone]",
            10,
            "injected, and missed: the target was gone already: [Errno 3] No such process",
        ),
        (
            "test_command[nothing]",
            10,
            "no effect was observed on its target: Own.inject yielded no Evidence",
        ),
        ("test_job[soon]", 11, f"could not act: KeyError: 'niceness' (PLACE:{LINE})"),
    ],
)
def test_a_fault_that_is_wrong_is_named(tmp_path: Path, test: str, status: int, told: str) -> None:
    file, report = tmp_path / "test_own.py", tmp_path / "report"
    file.write_text(SUITE)
    arguments = [f"{file}::{test}", "-q", "-p", "no:cacheprovider", f"--chaos-report={report}"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == status, process.stdout
    lines = [line for line in process.stdout.splitlines() if line.startswith("  - ")]
    assert any(told.replace("PLACE", str(file)) in line for line in lines), process.stdout
    assert "Traceback" not in process.stdout
    page = (report / "report.html").read_text()
    assert "Own(rank=" in page
    assert ("could not act" in page) is (status == 11)
