"""Chaos tests under pytest-xdist: a supervisor and directories per process, one report, one exit
status.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.waiting import wait_until

pytest.importorskip("xdist")

JOB = f"{Path(__file__).parents[2] / 'jobs' / 'wrong' / 'unfaithful.py'}"

#: Settings of a separate session, which does not read those of this repository.
RELAXED = "[pytest]\nchaos_detection = relaxed\n"

SESSION = f"""
import os
import signal
from pathlib import Path

import pytest

from faults import Kill

JOB = {JOB!r}

@pytest.fixture(autouse=True)
def where(chaos):
    yield
    supervisors = [pid for pid in Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()
                 if Path(f"/proc/{{pid}}/comm").read_text().strip() == "ck-supervisor"]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    with open("seen.txt", "a") as seen:
        seen.write(f"{{worker}} {{' '.join(supervisors)}}\\n")

@pytest.mark.parametrize("step", range(4))
def test_passes(chaos, step):
    chaos.run(JOB + ":faithful", nodes=2, steps=10, faults=[Kill(rank=1, at_step=4 + step)])

def test_unknown(chaos):
    chaos.run(JOB + ":faithful", nodes=2, steps=10, faults=[Kill(rank=1, at_step=4, signum=signal.SIGURG)])

def test_fails(chaos):
    chaos.run(JOB + ":fails_everywhere", nodes=2, steps=10, twin=False, max_failures=2)

def test_error(chaos):
    from chaoskit.errors import HarnessError
    raise HarnessError("the harness broke")
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("tests", "status", "verdicts"),
    [
        pytest.param("passes", 0, ["passed"] * 4, marks=pytest.mark.slow),
        pytest.param("passes or unknown", 10, ["passed"] * 4 + ["unknown"], marks=pytest.mark.slow),
        ("unknown or fails", 1, ["failed", "unknown"]),
        pytest.param("passes or error", 11, ["passed"] * 4, marks=pytest.mark.slow),
    ],
)
def test_two_workers_make_one_report_and_one_status(
    pytester: pytest.Pytester, tests: str, status: int, verdicts: list[str]
) -> None:
    """The worst verdict is the exit status, as without xdist, and every outcome is in the report."""
    pytester.makeini(RELAXED)
    pytester.makepyfile(test_session=SESSION)
    result = pytester.runpytest_subprocess(
        "-n", "2", "-k", tests, "--chaos-report", "report", "-p", "no:cacheprovider"
    )
    assert result.ret == status, result.stdout.str()
    outcomes = [
        json.loads(path.read_bytes()) for path in pytester.path.glob("report/runs/*/*/outcome.json")
    ]
    assert sorted(outcome["verdict"] for outcome in outcomes) == verdicts
    assert len({outcome["directory"] for outcome in outcomes}) == len(outcomes)
    assert len({outcome["session"] for outcome in outcomes}) == 1, "it is one session"
    assert all((Path(outcome["directory"]) / "plan.json").is_file() for outcome in outcomes)
    page = (pytester.path / "report" / "report.html").read_text()
    assert all(outcome["name"] in page for outcome in outcomes)
    result.stdout.fnmatch_lines([f"*chaoskit: {len(verdicts)} runs, *report.html*"])


@pytest.mark.slow
def test_each_worker_has_its_own_supervisor(pytester: pytest.Pytester) -> None:
    """Two processes never share a supervisor, and both work; no supervisor survives its worker."""
    pytester.makeini(RELAXED)
    pytester.makepyfile(test_session=SESSION)
    result = pytester.runpytest_subprocess("-n", "2", "-k", "passes", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)
    pairs = {tuple(line.split()) for line in (pytester.path / "seen.txt").read_text().splitlines()}
    assert {worker for worker, _ in pairs} == {"gw0", "gw1"}
    supervisors = [supervisor for _, supervisor in pairs]
    assert len(supervisors) == len(set(supervisors)) == 2
    wait_until(
        lambda: not any(Path(f"/proc/{supervisor}").exists() for supervisor in supervisors),
        "the end of both",
    )
