"""A fault and a backend of another distribution work like built-in ones: listed, drawn, run, saved,
replayed, undone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from chaoskit.substrate.docker import daemon

EXTENSION = Path(__file__).parents[2] / "extension"
JOB = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"
RUN = """
import sys
from chaoskit.config import DETECTION
from chaoskit.experiment.harness import Harness
from chaoskit_renice import ReniceNode

job, substrate, directory, seconds = sys.argv[1:]
with Harness(substrate, directory) as harness:
    fault = ReniceNode(rank=1, at_step=3, lift_after_s=float(seconds))
    print("begun", flush=True)
    outcome = harness.run(
        job, nodes=2, steps=60, options={"step_s": 0.02}, faults=[fault], twin=False, **DETECTION["relaxed"]
    )
print(outcome.verdict.value, *[evidence.observed for evidence in outcome.faults[0].evidence], sep="\\n")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes that find the distribution as if it were installed."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXTENSION / "pyproject.toml").read_text())["project"]
    (module,) = EXTENSION.glob("*.py")
    shutil.copy(module, site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run_python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_page_shows_what_is_tested() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "write-a-fault.md").read_text()
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    code = "".join(path.read_text() for path in EXTENSION.iterdir() if path.is_file())
    parts = [
        block for block in shown if "class Renice(Fault)" not in block
    ]  # test_write_a_fault.py runs it
    assert len(parts) == 4
    assert [block for block in parts if block.strip() not in code] == []


def test_it_is_listed(environment: dict[str, str]) -> None:
    listed = run_python(environment, "-m", "chaoskit", "faults", "--json")
    names = [fault["name"] for fault in json.loads(listed.stdout)["faults"]]
    assert names.count("ReniceNode") == 1
    shown = run_python(environment, "-m", "chaoskit", "faults", "renicenode").stdout
    assert "the main threads of one node get the CPU last" in shown
    assert "niceness of each main thread, read back" in shown
    unknown = run_python(dict(os.environ), "-m", "chaoskit", "faults", "ReniceNode")
    assert unknown.returncode == 2, "it is not installed there"


def test_plans_draw_it(environment: dict[str, str]) -> None:
    code = """
from hypothesis import find, settings
from faults.strategies import fault_plans
plan = find(fault_plans(nodes=4, steps=20), lambda plan: any(one.kind == "ReniceNode" for one in plan))
print(*plan)
"""
    drawn = run_python(environment, "-c", code)
    assert drawn.stdout.startswith("ReniceNode("), drawn.stderr


@pytest.fixture(scope="module")
def run(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Return the directory of a run with the fault, and the output lines of its runner."""
    directory = tmp_path_factory.mktemp("runs")
    process = run_python(environment, "-c", RUN, JOB, "local", str(directory), "0.3")
    assert process.returncode == 0, process.stderr
    return next(directory.glob("*")), process.stdout.splitlines()


def test_it_is_confirmed_by_what_the_kernel_says(run: tuple[Path, list[str]]) -> None:
    _, (_, verdict, *evidence) = run
    assert verdict == "passed"
    assert any("processes of node1 have niceness 19" in line for line in evidence)


@pytest.mark.slow
def test_its_plan_is_replayed_where_it_can_be_imported(
    environment: dict[str, str], run: tuple[Path, list[str]]
) -> None:
    plan = run[0] / "plan.json"
    (fault,) = json.loads(plan.read_text())["faults"]
    assert fault["kind"] == "chaoskit_renice:ReniceNode"
    again = run_python(environment, "-m", "chaoskit", "replay", str(plan), "--json", "--no-twin")
    assert again.returncode == 0, again.stdout + again.stderr
    refused = run_python(dict(os.environ), "-m", "chaoskit", "replay", str(plan))
    assert refused.returncode == 2
    assert "install its distribution, or add its directory to PYTHONPATH" in " ".join(
        (refused.stdout + refused.stderr).split()
    )


def test_its_plan_is_judged_again_where_it_cannot_be_imported(run: tuple[Path, list[str]]) -> None:
    again = run_python(dict(os.environ), "-m", "chaoskit", "judge", str(run[0]))
    assert again.returncode == 0, again.stdout + again.stderr


def test_its_plan_is_made_simpler_like_any_other(
    environment: dict[str, str], run: tuple[Path, list[str]]
) -> None:
    """A search for the smallest failing plan keeps the fault in each of its steps."""
    code = """
import sys
from pathlib import Path
from chaoskit.experiment.plan.planfile import load
from chaoskit.experiment.shrink.simpler import simpler
plans = [*simpler(load(Path(sys.argv[1])))]
print(len(plans), {one.kind for plan in plans for one in plan.faults})
"""
    process = run_python(environment, "-c", code, str(run[0] / "plan.json"))
    assert "{'ReniceNode'}" in process.stdout, process.stderr


def test_without_its_effect_the_run_is_unknown(environment: dict[str, str], tmp_path: Path) -> None:
    off = "import os; os.setpriority = lambda *_: None\n"
    process = run_python(environment, "-c", off + RUN, JOB, "local", str(tmp_path), "0.3")
    assert process.stdout.splitlines()[1] == "unknown", process.stderr


@pytest.mark.parametrize("name", ["tidy", "chaoskit_renice:TidySubstrate"])
def test_nodes_can_come_from_elsewhere(
    environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    """A substrate is named by an entry point, or by module and factory."""
    process = run_python(environment, "-c", RUN, JOB, name, str(tmp_path), "0.3")
    assert process.stdout.splitlines()[1] == "passed", process.stderr
    assert [*tmp_path.glob("*/tidy")]
    unknown = run_python(
        dict(os.environ), "-c", "from chaoskit.experiment.harness import Harness; Harness('tidy')"
    )
    assert "use one of local, netns, docker, kubernetes, or module:factory" in unknown.stderr


def test_it_is_refused_where_it_cannot_be_done(environment: dict[str, str], tmp_path: Path) -> None:
    if reason := daemon.unavailable():
        pytest.skip(reason)
    process = run_python(environment, "-c", RUN, JOB, "docker", str(tmp_path), "0.3")
    assert "BadInput" in process.stderr
    assert "local or netns" in process.stderr


def test_a_killed_run_of_it_is_put_back_by_the_guard(
    environment: dict[str, str], tmp_path: Path
) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-c", RUN, JOB, "local", str(tmp_path), "3600"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    with runner:
        wait_until(
            lambda: [*tmp_path.glob("*/journal/harness*")] and _is_confirmed(tmp_path),
            "the evidence",
        )
        runner.send_signal(signal.SIGKILL)
    wait_until(lambda: [*tmp_path.glob("*/put-back")], "the command of its undo entry")


def _is_confirmed(directory: Path) -> Any:
    from chaoskit.journal import read_events
    from chaoskit.vocabulary import Event

    return [
        record
        for path in directory.glob("*/journal")
        for record in read_events(path, Event.EVIDENCE)
    ]
