"""The README: its figures are measured, its test runs, and it stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from figures import BEGIN, END, table

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_benchmarks() -> None:
    """`python docs/generate/figures.py --write` repairs it."""
    _, _, rest = README.partition(f"{BEGIN}\n")
    assert rest.partition(f"\n{END}")[0] == table()


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if line.startswith("|") and len(line) > 160] == []


@pytest.mark.costly
def test_the_first_test_of_the_readme_passes(tmp_path: Path) -> None:
    """The first test recovers from its three faults; here without a limit in time, which a busy machine may miss."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert "within_s=5.0" in code
    (tmp_path / "test_three.py").write_text(code.replace("within_s=5.0", "within_s=600.0"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--chaos-report", "report"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert all(fault in page for fault in ("Kill(rank=2", "Hang(rank=1", "NaN(rank=0"))
