"""The README: its figures are measured, its test runs, and it stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from figures import BEGIN, END, table

from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.job import resolve_job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
RECIPE = re.compile(r"torchrun\b.*--max-restarts|command\W+\[.*torchrun")


def test_the_figures_are_those_of_the_benchmarks() -> None:
    """The figures are those of the benchmarks; `python docs/generate/figures.py --write` updates
    them.
    """
    _, _, rest = README.partition(f"{BEGIN}\n")
    assert rest.partition(f"\n{END}")[0] == table()


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if line.startswith("|") and len(line) > 160] == []


def block_of(name: str) -> str:
    """Return the first Python block of the README that defines a function."""
    return next(
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if f"def {name}(" in block
    )


def test_the_job_of_the_readme_fits_its_test(tmp_path: Path) -> None:
    """The test gives the job ``steps``, which its train function takes; ``chaoskit launch`` needs
    no option.
    """
    job = tmp_path / "train.py"
    job.write_text(block_of("train"))
    assert 'chaos.run("train.py", nodes=4, steps=40,' in block_of("test_three_faults_cost_no_step")
    assert plan_experiment(str(job), nodes=4, steps=40).steps == 40
    assert resolve_job(str(job)).options == {}


def test_the_rules_for_a_script_are_the_same_everywhere() -> None:
    adopting = (DOCS / "adopting.md").read_text(encoding="utf-8")
    rules = {
        "README.md": re.findall(r"^\d\. \*\*(.+?)\*\*", README, re.MULTILINE),
        "adopting.md": re.findall(r"^\d\. \*\*(.+?)\.?\*\*", adopting, re.MULTILINE),
    }
    assert rules["README.md"] == rules["adopting.md"]
    assert len(rules["README.md"]) == 5
    assert "Five rules" in README
    assert "## Five rules" in adopting


def test_recipes_keep_the_addresses_of_ranks_that_ended_out_of_torchruns_store() -> None:
    """A command with restarts needs the variable, and README's becomes one with an option that its
    text names.
    """
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    recipes = [block_of("test_torchrun_survives_a_lost_rank")]
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8").replace("OWN_STORE, ", f'"{variable}", ')
        recipes += [line for line in text.splitlines() if RECIPE.search(line)]
    assert len(recipes) >= 4
    assert [recipe for recipe in recipes if variable not in recipe] == []


@pytest.mark.costly
def test_the_first_test_of_the_readme_passes(tmp_path: Path) -> None:
    """The first test recovers from its three faults; here without a limit in time, which a busy
    machine may miss.
    """
    code = block_of("test_three_faults_cost_no_step")
    assert "within_s=5.0" in code
    (tmp_path / "train.py").write_text(block_of("train"))
    (tmp_path / "test_three.py").write_text(code.replace("within_s=5.0", "within_s=600.0"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nchaos_detection = relaxed\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--chaos-report",
        "report",
    ]
    environment = {
        name: setting for name, setting in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert all(fault in page for fault in ("Kill(rank=2", "Hang(rank=1", "NaN(rank=0"))
