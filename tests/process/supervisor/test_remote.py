"""Tests of experiments that are run by a driver, another process at the other end of a stream, here
over loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.nodes.loopback import LoopbackDriver
from support.waiting import wait_until

from chaoskit.config import DETECTION
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.directory import judge_directory
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.remote.client import RemoteHost, roots_of
from chaoskit.plaintext import tell_on_stderr
from chaoskit.substrate.core.actions import CapProcessCpu
from chaoskit.substrate.undo.files import folder, runtime_directory
from chaoskit.vocabulary import Verdict
from faults import Cut, Fault, Kill

TESTS = Path(__file__).parents[2]
JOB = f"{TESTS / 'jobs' / 'failing' / 'troubled.py'}:plain"
OWN_FAULT = """
from dataclasses import dataclass
from faults import Kill

@dataclass(frozen=True)
class KillOfMine(Kill):
    "A kind that no installed distribution has."
"""


@pytest.fixture(scope="module")
def place() -> LoopbackDriver:
    return LoopbackDriver()


@pytest.fixture(scope="module")
def host(place: LoopbackDriver) -> Iterator[RemoteHost]:
    made = RemoteHost(place, tell_on_stderr)
    yield made
    made.close()


@pytest.fixture(scope="module")
def harness(host: RemoteHost, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(host, tmp_path_factory.mktemp("runs"))


def run(harness: Harness, *faults: Fault, job: str = JOB, **plan: Any) -> Any:
    settings: dict[str, Any] = {"nodes": 2, "steps": 30, "options": {"step_s": 0.02}, "twin": False}
    return harness.run(job, faults=faults, **DETECTION["relaxed"], **{**settings, **plan})


def driver(place: LoopbackDriver) -> psutil.Process:
    """Return the program that the supervisor has started."""
    assert place.process is not None
    (program,) = psutil.Process(place.process.pid).children()
    return program


@pytest.mark.costly
def test_a_run_there_is_judged_here(harness: Harness, place: LoopbackDriver) -> None:
    """All records of the run are copied into its directory here; the driver keeps none of them
    afterwards.
    """
    outcome = run(harness, Kill(rank=1, at_step=8), twin=True)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert [record.state for record in outcome.faults] == ["confirmed"]
    directory = Path(outcome.directory)
    journals = {path.stem for path in (directory / "journal").iterdir()}
    assert {"harness", "coordinator", "node0", "node1", "node0.0", "node1.0", "node1.1"} <= journals
    assert {"coordinator.log", "node0.log", "node1.1.log"} <= {
        path.name for path in (directory / "log").iterdir()
    }
    again = judge_directory(directory)
    assert (again.verdict, again.reasons) == (outcome.verdict, outcome.reasons)
    assert not list((place.files / "runs").glob("*/*"))


@pytest.mark.costly
def test_the_code_of_a_job_travels(harness: Harness, tmp_path: Path) -> None:
    """The files beside the job travel, too, and the driver's nodes run the copy."""
    source = (TESTS / "jobs" / "failing" / "troubled.py").read_text()
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text(
        f"{source}\nimport beside\n\nassert not beside.__file__.startswith({str(tmp_path)!r})\n"
    )
    assert run(harness, job=f"{tmp_path / 'train.py'}:plain").verdict == Verdict.PASSED


@pytest.mark.costly
def test_a_fault_of_a_users_own_travels(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults_of_mine.py").write_text(OWN_FAULT)
    monkeypatch.syspath_prepend(tmp_path)
    fault: Fault = import_module("faults_of_mine").KillOfMine(rank=1, at_step=8)
    assert roots_of([fault, Kill(rank=1, at_step=8)]) == [tmp_path]
    outcome = run(harness, fault)
    assert (outcome.verdict, outcome.faults[0].state) == (Verdict.PASSED, "confirmed"), (
        outcome.reasons
    )


def test_a_live_view_is_shown_what_happens(harness: Harness) -> None:
    messages: list[Any] = []
    assert run(harness, watch=messages.append).verdict == Verdict.PASSED
    assert {"Formed", "EndJob"} <= {type(message).__name__ for message in messages}


def test_what_cannot_be_done_there_is_refused_here(harness: Harness, host: RemoteHost) -> None:
    """The error has the same words as on a local substrate, and comes before anything starts."""
    with pytest.raises(BadInput, match=r"faults='.*use the substrate netns"):
        run(harness, Cut(rank=1, at_step=8))
    assert host.why_not(CapProcessCpu) == ""
    with pytest.raises(BadInput, match=r"batch_size=8: use a multiple of the number of shards, 3"):
        run(harness, job="gpt", nodes=3, options={"size": "tiny"})
    many = [Kill(rank=1, at_step=8 + step) for step in range(2000)]
    with pytest.raises(BadInput, match="plan fewer: a plan may have 65536 bytes"):
        run(harness, *many, steps=3000)


def test_what_is_refused_there_is_told_here(harness: Harness) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(BadInput, match=r"port='.*choose a free port") as refused,
    ):
        harness.run_planned(
            plan_experiment(JOB, nodes=1, steps=3), twin=False, port=taken.getsockname()[1]
        )
    assert refused.value.__context__ is None, "no other error was being handled"


@pytest.mark.costly
def test_a_driver_that_dies_is_an_error_of_its_run_only(
    harness: Harness, place: LoopbackDriver
) -> None:
    before = run(harness)

    def kill(message: Any) -> None:
        if type(message).__name__ == "Formed":
            driver(place).kill()

    with pytest.raises(HarnessError, match="the driver of the run ended"):
        run(harness, watch=kill, steps=3000)
    after = run(harness)
    assert (before.verdict, after.verdict) == (Verdict.PASSED, Verdict.PASSED)


@pytest.mark.costly
def test_a_run_that_is_broken_off_ends_there(harness: Harness, place: LoopbackDriver) -> None:
    """The run ends as by Ctrl-C, and leaves nothing that disturbs the next run."""

    def interrupt(message: Any) -> None:
        if type(message).__name__ == "Formed":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(harness, watch=interrupt, steps=3000)
    assert place.process is not None
    assert not psutil.Process(place.process.pid).children(recursive=True)
    assert run(harness).verdict == Verdict.PASSED


@pytest.mark.costly
def test_a_supervisor_that_dies_is_an_error_of_its_run_only(tmp_path: Path) -> None:
    place = LoopbackDriver()
    host = RemoteHost(place, tell_on_stderr)
    with contextlib.closing(host), Harness(host, tmp_path / "runs") as harness:

        def kill(message: Any) -> None:
            if type(message).__name__ == "Formed":
                assert place.process is not None
                place.process.kill()

        with pytest.raises(HarnessError, match="has ended, and with it the driver"):
            run(harness, watch=kill, steps=3000)
        assert run(harness).verdict == Verdict.PASSED


@pytest.mark.costly
def test_a_supervisor_whose_end_is_heard_late_costs_no_run(tmp_path: Path) -> None:
    """The late end closes only its own stream, after the next run has begun."""
    place = LoopbackDriver()
    host = RemoteHost(place, tell_on_stderr)
    with contextlib.closing(host), Harness(host, tmp_path / "runs") as harness:
        assert run(harness).verdict == Verdict.PASSED
        assert place.process is not None
        place.process.send_signal(signal.SIGSTOP)
        end = threading.Timer(1.0, place.process.kill)
        end.start()
        assert run(harness).verdict == Verdict.PASSED
        end.join()


LEAVES_A_MARK = """
import sys, time
from chaoskit.substrate.undo import CommandEntry, UndoLog

UndoLog().plan(CommandEntry(f"touch {sys.argv[1]}"))
print("planned", flush=True)
time.sleep(60)
"""


def test_what_a_killed_client_and_its_guard_have_left_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next client puts it back, since effects outside the driver, such as on machines, belong
    to the client.
    """
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    command = [sys.executable, "-c", LEAVES_A_MARK, str(tmp_path / "put-back")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "planned\n"
        for process in (*psutil.Process(client.pid).children(recursive=True), client):
            process.kill()
    assert not (tmp_path / "put-back").exists()
    RemoteHost(LoopbackDriver(), tell_on_stderr).close()
    assert (tmp_path / "put-back").exists()


@pytest.mark.slow
@pytest.mark.costly
def test_a_twin_is_of_the_machines_that_are_there(tmp_path: Path) -> None:
    """A twin of a supervisor that is gone is not used: the next one may run on another
    processor.
    """
    place = LoopbackDriver()
    host = RemoteHost(place, tell_on_stderr)
    with contextlib.closing(host), Harness(host, tmp_path / "runs") as harness:
        for _ in range(2):
            assert run(harness, twin=True).verdict == Verdict.PASSED
        assert place.process is not None
        place.process.kill()
        place.process.wait()
        assert run(harness, twin=True).verdict == Verdict.PASSED
    assert len(list((tmp_path / "runs").glob("*twin*"))) == 2


@pytest.mark.costly
def test_a_twin_is_of_the_files_that_it_was_run_with(harness: Harness, tmp_path: Path) -> None:
    """Another directory may hold equal files; a change in the first directory makes another
    twin.
    """
    source = (TESTS / "jobs" / "failing" / "troubled.py").read_text()
    for name in ("first", "second"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "__init__.py").write_text("")
        (tmp_path / name / "train.py").write_text(f"{source}\nimport lib\n")
    jobs = [f"{tmp_path / name / 'train.py'}:plain" for name in ("first", "second")]
    directories = [Path(run(harness, job=job, twin=True).directory) for job in jobs]
    (tmp_path / "first" / "lib" / "__init__.py").write_text("x = 1\n")
    directories.append(Path(run(harness, job=jobs[0], twin=True).directory))
    assert len({(directory / "twin.json").read_bytes() for directory in directories}) == 3


@pytest.mark.costly
def test_a_driver_ends_in_order(tmp_path: Path) -> None:
    """The driver puts back what its runs have left, and closes its undo log."""
    host = RemoteHost(LoopbackDriver(), tell_on_stderr)
    with contextlib.closing(host), Harness(host, tmp_path / "runs") as harness:
        assert run(harness).verdict == Verdict.PASSED
        assert host.driver is not None
        logs = f"{host.driver.pid}-*"
        assert list(folder(runtime_directory()).glob(logs))
    assert not list(folder(runtime_directory()).glob(logs))


@pytest.mark.costly
def test_nothing_is_left_of_a_client_that_is_killed(tmp_path: Path) -> None:
    """The stream ends on both sides, and with it the supervisor and every process that the driver
    has started.
    """
    script = f"""
from support.nodes.loopback import host
from chaoskit.experiment.harness import Harness
def watch(message):
    if type(message).__name__ == "Formed":
        print("formed", flush=True)
harness = Harness(host(), {str(tmp_path / "runs")!r})
harness.run({JOB!r}, nodes=2, steps=3000, twin=False, options={{"step_s": 0.02}}, watch=watch)
"""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "formed\n"
        started = psutil.Process(client.pid).children(recursive=True)
        assert len(started) > 6
        client.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(process.is_running() for process in started),
        f"the end of {started}",
        limit_s=30.0,
    )
    wait_until(
        lambda: not list((tmp_path / "tmp").glob("chaoskit-driver-*")),
        "the end of its files",
        limit_s=30.0,
    )
