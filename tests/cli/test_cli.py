"""Tests of the command line as a user runs it: real processes, on terminals and pipes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.launcher.progress import Progress
from chaoskit.process.linux import start_ticks
from chaoskit.wire.messages import (
    Beat,
    Endpoint,
    Heartbeat,
    Member,
    OfferedSnapshot,
    Plan,
    Welcome,
    WorkerLost,
)

LIMIT_S = 300.0  # limit of a command, which may be a whole experiment
STEPS = 40

SCRIPT = """
import time
import torch
from torch import nn


def train(trainer, *, steps: int = 40, size: int = 64, pause: float = 0.0, fail: bool = False, early: int = -1):
    torch.manual_seed(trainer.seed)
    print("a worker speaks")
    if fail:
        raise ValueError("boom: this cannot work \\x1b[2J[red]again[/red]")
    data = torch.linspace(0, 1, size).unsqueeze(1)
    model = nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                time.sleep(pause)
                step.backward(((model(shard.batch) - 3 * shard.batch) ** 2).mean())
        if trainer.rank == 1 and trainer.step == early:
            return
"""


class Workplace:
    """A directory to run commands in, with a mark by which every process that they leave behind is
    found.
    """

    def __init__(self, directory: Path, cache: Path) -> None:
        self.directory, self.state = directory, directory / "state"
        self.mark = f"CHAOSKIT_TEST_MARK={uuid.uuid4()}"
        name, _, mark_value = self.mark.partition("=")
        directories = {
            "XDG_STATE_HOME": self.state,
            "XDG_RUNTIME_DIR": self.state,
            "XDG_CACHE_HOME": cache,
        }
        self.environment = {
            **os.environ,
            **{key: str(path) for key, path in directories.items()},
            name: mark_value,
        }
        (directory / "train.py").write_text(SCRIPT)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "chaoskit", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def start(self, *arguments: str, **how: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments), cwd=self.directory, env=self.environment, text=True, **how
        )

    def processes(self) -> list[int]:
        """Return the pids of all living processes that a command of this workplace started."""
        pids = []
        for process_directory in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process_directory / "environ").read_bytes():
                    pids.append(int(process_directory.name))
            except OSError:
                continue
        return pids

    def await_silence(self) -> None:
        wait_until(
            lambda: not self.processes(), "the end of all processes of the workplace", poll_s=0.05
        )

    def records(self, directory: str, source: str) -> list[dict[str, Any]]:
        path = self.directory / directory / "journal" / f"{source}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pid_of_rank(self, directory: str, rank: int) -> int:
        """Return the pid of the worker that has this rank by the newest plan."""
        plans = [
            record for record in self.records(directory, "coordinator") if record["event"] == "plan"
        ]
        (worker,) = [member["worker"] for member in plans[-1]["members"] if member["rank"] == rank]
        node = worker.partition(".")[0]
        (pid,) = [
            record["pid"]
            for record in self.records(directory, node)
            if record["event"] == "worker_started" and record["worker"] == worker
        ]
        return int(pid)

    def commits(self, directory: str) -> int:
        """Return the steps committed by the rank that has most; any worker may be the spare."""
        sources = [path.stem for path in (self.directory / directory / "journal").glob("*.*.jsonl")]
        return max(
            (
                sum(record["event"] == "commit" for record in self.records(directory, name))
                for name in sources
            ),
            default=0,
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workplace(tmp_path: Path, cache: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path, cache)
    yield place
    for pid in place.processes():
        os.kill(pid, signal.SIGKILL)


# -- launch ----------------------------------------------------------------------------------------


@pytest.mark.promise("trains with recovery; live view of step, loss, world and recoveries")
@pytest.mark.costly
def test_a_killed_rank_changes_nothing(workplace: Workplace) -> None:
    """A job that loses a rank ends with the loss and the weights of the job that did not, and
    leaves no process.
    """
    options = ["--nodes", "2", "--json", "--set", "steps=40"]
    calm = workplace.run("launch", "train.py", *options, "--report", "calm")
    assert calm.returncode == 0, calm.stderr
    unbroken = json.loads(calm.stdout)  # one object and nothing else
    assert (unbroken["ok"], unbroken["steps"], unbroken["recoveries"]) == (True, STEPS, [])
    assert 0 < unbroken["loss"] < 1
    assert "a worker speaks" in (workplace.directory / unbroken["logs"] / "node0.0.log").read_text()

    launcher = workplace.start(
        "launch", "train.py", *options, "--set", "pause=0.05", "--report", "hit", stdout=-1
    )
    wait_until(lambda: workplace.commits("hit") > 5, "the first steps")
    os.kill(workplace.pid_of_rank("hit", 1), signal.SIGKILL)
    stdout, _ = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0
    broken = json.loads(stdout)
    assert (broken["steps"], broken["generation"] > 1, len(broken["recoveries"])) == (
        STEPS,
        True,
        1,
    )
    assert broken["loss"] == unbroken["loss"]
    assert broken["weights_digest"] == unbroken["weights_digest"] != ""
    assert broken["cut_short_by"] == unbroken["cut_short_by"] == ""
    workplace.await_silence()


@pytest.mark.costly
def test_the_first_of_two_ranks_to_return_is_named(workplace: Workplace) -> None:
    """The other rank reports last, when the launcher only waits for the end."""
    options = ["--nodes", "2", "--spares", "0", "--set", "early=7", "--report", "run", "--json"]
    done = workplace.run("launch", "train.py", *options)
    result = json.loads(done.stdout)
    members = [
        record for record in workplace.records("run", "coordinator") if record["event"] == "plan"
    ][-1]["members"]
    (early,) = [member["worker"] for member in members if member["rank"] == 1]
    assert (result["ok"], result["steps"], result["cut_short_by"]) == (True, 7, early)


@pytest.mark.slow
@pytest.mark.promise("the first one that returns ends the run for all")
@pytest.mark.costly
def test_a_rank_that_returns_early_ends_the_run_and_that_is_said(workplace: Workplace) -> None:
    """A rank that returns early ends the run, and the launch says so: the run did not take all its
    steps.
    """
    done = workplace.run(
        "launch", "train.py", "--nodes", "3", "--shards", "4", "--set", "early=7", "--report", "run"
    )
    assert done.returncode == 0, done.stdout
    journals = (workplace.directory / "run" / "journal").glob("*.*.jsonl")
    finished = {  # by worker; the spare has none
        path.stem: record
        for path in journals
        for record in workplace.records("run", path.stem)
        if record["event"] == "finished"
    }
    assert {end["step"] for end in finished.values()} == {7}
    early, *others = sorted(finished, key=lambda worker: str(finished[worker]["cut_short_by"]))
    assert [finished[worker]["cut_short_by"] for worker in (early, *others)] == ["", early, early]
    assert f"ended after step 7: {early} returned from its train function" in done.stdout


@pytest.mark.slow
@pytest.mark.promise(
    "The same exception on every rank and its replacement without a step in between ends the job as a bug"
)
@pytest.mark.costly
def test_a_script_that_fails_everywhere_says_why(workplace: Workplace) -> None:
    """A script that fails on every rank ends the launch with the traceback of a worker."""
    done = workplace.run("launch", "train.py", "--nodes", "2", "--set", "fail=true")
    assert done.returncode == 1
    assert "training failed" in done.stdout
    assert done.stdout.count(r"ValueError: boom: this cannot work \x1b[2J[red]again[/red]") >= 2
    assert "\x1b" not in done.stdout, "text of a job does nothing to a terminal"
    assert "in train\n" in done.stdout  # the traceback, from the worker's log
    assert "the last error" not in done.stdout, "the reason of the end names it"
    assert re.search(r"training failed: ValueError: .*/train\.py:\d+\)\n", done.stdout)
    workplace.await_silence()


@pytest.mark.costly
def test_ctrl_c_on_a_terminal_ends_everything(workplace: Workplace) -> None:
    """Ctrl-C ends the job and all its processes, with status 130 and nothing left to undo."""
    master, slave = pty.openpty()
    launcher = workplace.start(
        *(
            "launch",
            "train.py",
            "--nodes",
            "2",
            "--set",
            "steps=100000",
            "--set",
            "pause=0.02",
            "--report",
            "run",
        ),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    screen = bytearray()
    reader = threading.Thread(target=_read_all, args=(master, screen))
    reader.start()
    wait_until(lambda: b"steps/s" in screen, "the live view")
    os.write(master, b"\x03")
    assert launcher.wait(LIMIT_S) == 130
    reader.join(LIMIT_S)
    os.close(master)
    assert b"rank 1" in screen
    assert b"interrupted; everything that this command had started was ended" in screen
    assert b"Traceback" not in screen
    workplace.await_silence()
    assert list((workplace.state / "chaoskit" / "undo").iterdir()) == []


def _read_all(descriptor: int, into: bytearray) -> None:
    while True:
        try:
            into += os.read(descriptor, 4096)
        except OSError:  # a terminal reports by an error that the other side is closed
            return


@pytest.mark.promise("Nothing outlives its owner.")
@pytest.mark.costly
def test_killing_the_launcher_ends_everything(workplace: Workplace) -> None:
    """A launcher that is killed leaves no process, and nothing to clean up."""
    before = workplace.run(
        "cleanup"
    ).stdout  # leftovers of other sessions on this machine, which cannot be put back
    launcher = workplace.start(
        *("launch", "train.py", "--nodes", "2", "--set", "steps=100000", "--report", "run"),
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: workplace.commits("run") > 0, "the first step")
    workers = [workplace.pid_of_rank("run", rank) for rank in range(2)]
    assert set(workers) < set(workplace.processes())
    launcher.kill()
    launcher.wait(LIMIT_S)
    workplace.await_silence()
    assert workplace.run("cleanup").stdout == before, "the guard has found that nothing is left"


# -- bad input -------------------------------------------------------------------------------------

LAUNCH = ["launch", "train.py", "--nodes", "2"]

BAD_INPUTS = [
    ([*LAUNCH, "--report", "/proc/nowhere"], "--report /proc/nowhere", "choose a directory"),
    (["launch", "nosuchjob"], "SCRIPT nosuchjob", "name a reference job"),
    (["launch", "missing.py"], "SCRIPT missing.py", "name a Python file that exists"),
    ([*LAUNCH, "--set", "steps"], "--set steps", "write key=value"),
    ([*LAUNCH, "--set", "stepz=3"], "--set stepz=3", "train takes early, fail, pause, size, steps"),
    ([*LAUNCH, "--set", "steps=many"], "--set steps=many", "use a value of type int"),
    ([*LAUNCH, "--setting", "hang_steps"], "--setting hang_steps", "write NAME=VALUE"),
    ([*LAUNCH, "--setting", "hang_stepz=5"], "--setting hang_stepz=5", "write hang_steps"),
    ([*LAUNCH, "--setting", "hang_steps=0.5"], "--setting hang_steps=0.5", "use 1 or more"),
    (
        [*LAUNCH, "--setting", "startup_s=Infinity"],
        "--setting startup_s=Infinity",
        "use a finite number",
    ),
    ([*LAUNCH, "--setting", "nodes=3"], "--setting nodes=3", "--nodes gives this setting"),
    ([*LAUNCH, "--setting", "deadline_s=3"], "--setting deadline_s=3", "there is no such setting"),
    ([*LAUNCH, "--setting", "disk.keep=3"], "--setting disk.keep=3", "use"),
    ([*LAUNCH, "--min-world", "3"], "--min-world 3", "use at most nodes=2"),
    ([*LAUNCH, "--shards", "1"], "--shards 1", "use at least nodes=2"),
    ([*LAUNCH, "--device=tpu"], "--device=tpu", "use one of cpu, cuda"),
    ([*LAUNCH, "--port", "70000"], "--port 70000", "choose a"),
    (
        [*LAUNCH, "--checkpoints", "/proc/nowhere"],
        "--checkpoints /proc/nowhere",
        "choose a directory",
    ),
    ([*LAUNCH, "--checkpoints", "kept", "--keep", "-1"], "--keep -1", "use 0 or more"),
    (
        [*LAUNCH, "--checkpoints", "kept", "--checkpoint-every", "0"],
        "--checkpoint-every 0",
        "use 1 or more",
    ),
    ([*LAUNCH, "--remote", "s3://bucket/run"], "--remote s3://bucket/run", "--checkpoints"),
    (
        [*LAUNCH, "--spare", "1"],
        "--spare",
        "there is no such option, write --spares; see chaoskit launch --help",
    ),
    (["launch", "train.py", "--nodes", "two"], "--nodes two", "use a valid integer"),
    (["launch"], "SCRIPT", "it is missing; see chaoskit launch --help"),
    (["lunch"], "command lunch", "write chaoskit launch"),
    (["janitor"], "command janitor", "write chaoskit cleanup"),
    (["quarantine", "list"], "command quarantine", "node list"),
    (["demo", "--report", "/proc/nowhere"], "--report /proc/nowhere", "choose a directory"),
    (["test", "nosuchsuite"], "SUITE nosuchsuite", "smoke"),
    (["report", "nowhere"], "DIRECTORY nowhere", "outcome.json"),
    (["replay", "nowhere.json"], "PLAN nowhere.json", "name a plan file that can be read"),
    (["replay", "train.py"], r"PLAN train.py", "write one JSON object"),
    (["replay", "train.py", "--times", "0"], "--times 0", "use 1 or more"),
    (["replay", "train.py", "--shrink", "--times", "5"], "--times 5", "leave it out"),
    (["launch", "train.py", "--nodes", "1000000"], "--nodes 1000000", "use at most 1024"),
    (["replay", "train.py", "--shrink", "--budget-s", "-1"], "--budget-s -1", "above 0"),
]


@pytest.mark.parametrize(("arguments", "field_and_value", "remedy"), BAD_INPUTS)
def test_bad_input_is_one_line_and_starts_nothing(
    workplace: Workplace, arguments: list[str], field_and_value: str, remedy: str
) -> None:
    """Bad input is one line with field, value and remedy, status 2, no file and no process."""
    done = workplace.run(*arguments)
    _assert_refused(done, field_and_value, remedy)
    assert {file.name for file in workplace.directory.iterdir()} == {"train.py"}
    workplace.await_silence()


def _assert_refused(
    done: subprocess.CompletedProcess[str], field_and_value: str, remedy: str
) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"chaoskit: {field_and_value}: ")
    assert done.stderr.count("\n") == 1
    assert remedy in done.stderr


def test_a_port_in_use_is_refused_in_json_too(workplace: Workplace) -> None:
    """A port that is in use is bad input, also in JSON."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = workplace.run(*LAUNCH, "--port", str(port), "--json")
    _assert_refused(done, f"--port {port}", "choose a free port")
    error = json.loads(done.stdout)["error"]
    assert (error["field"], error["value"]) == ("port", port)
    workplace.await_silence()


@pytest.mark.costly
def test_a_dataset_shorter_than_a_batch_is_bad_input(workplace: Workplace) -> None:
    """Bad input that only a worker finds is reported as any other."""
    done = workplace.run(*LAUNCH, "--set", "size=4", "--json")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "chaoskit: dataset=4: use a dataset of at least one global batch"
    )
    assert json.loads(done.stdout)["error"]["field"] == "dataset"
    workplace.await_silence()


# -- the other commands ----------------------------------------------------------------------------


@pytest.mark.costly
def test_the_demonstration_passes_and_can_be_reported(workplace: Workplace) -> None:
    """The demonstration passes, and its outcome can be rendered again."""
    done = workplace.run("demo", "--quick", "--report", "shown", "--json")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["verdict"]) == (0, "passed"), shown["outcome"]["reasons"]
    assert shown["continuity"] == "24 of 24 losses bit-equal to the unbroken run, weights too"
    assert len(shown["outcome"]["recoveries"]) == 3
    directory = workplace.directory / "shown"
    names = ["report.html", "outcome.json", "timeline-1.svg", "timeline-2.svg", "timeline-3.svg"]
    assert [name for name in names if not (directory / name).is_file()] == []
    workplace.await_silence()

    reported = workplace.run("report", "shown", "--html", "page.html", "--junit", "junit.xml")
    assert reported.returncode == 0, reported.stderr
    assert "PASSED" in reported.stdout
    assert (workplace.directory / "page.html").is_file()
    assert (workplace.directory / "junit.xml").is_file()
    refused = workplace.run("report", "shown", "--html", ".")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--html .: name a file, such as page.html" in refused.stderr
    (directory / "report.html").unlink()
    recovery = json.loads(workplace.run("report", "shown", "--json", "--check").stdout)["recovery"]
    assert not (directory / "report.html").exists(), "a report does not write into what it shows"
    assert (recovery["total"]["recovered"], recovery["total"]["tried"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.costly
def test_a_plan_is_run_again_and_again(workplace: Workplace) -> None:
    """A plan runs as often as asked for; the status is the worst verdict; every run leaves its plan
    and outcome.
    """
    kill = {"kind": "Kill", "rank": 1, "at_step": 5}
    plan = {
        "version": 2,
        "job": "train.py",
        "name": "mine",
        "steps": 20,
        "settings": {"nodes": 2},
        "faults": [kill],
    }
    (workplace.directory / "plan.json").write_text(json.dumps(plan))
    done = workplace.run("replay", "plan.json", "--times", "2", "--json", "--report", "runs")
    assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout)
    assert (replayed["verdict"], replayed["runs"], replayed["failed"]) == ("passed", 2, 0)
    assert replayed["failure_interval"][0] == 0.0 < replayed["failure_interval"][1] < 1.0
    assert "failed 0 of 2 runs: 0 % (95 % interval 0 % to 65.8 %)" in done.stderr
    assert all(outcome["faults"][0]["state"] == "confirmed" for outcome in replayed["outcomes"])
    plans = list((workplace.directory / "runs").glob("*-mine/plan.json"))
    assert len(plans) == len(list((workplace.directory / "runs").glob("*-mine/outcome.json"))) == 2

    survived = json.loads(plans[0].read_text())
    survived["faults"][0]["signum"] = int(signal.SIGURG)
    plans[0].write_text(json.dumps(survived))
    done = workplace.run("replay", str(plans[0]))
    assert done.returncode == 10, done.stderr
    assert "UNKNOWN" in done.stdout
    workplace.await_silence()


FAILS_THE_SECOND_TIME = """
from pathlib import Path
from train import train as trains


def train(trainer, *, steps: int = 40):
    if len(list((Path(__file__).parent / "runs").glob("*-mine"))) == 2:
        raise ValueError("boom: this is the second run")
    trains(trainer, steps=steps)
"""


@pytest.mark.slow
@pytest.mark.promise("The worst run decides the exit code.")
@pytest.mark.costly
def test_of_three_runs_the_one_that_fails_decides_the_status(workplace: Workplace) -> None:
    """The status is that of the second run, which fails, and neither of the first nor of the last
    one.
    """
    (workplace.directory / "second.py").write_text(FAILS_THE_SECOND_TIME)
    plan = {
        "version": 2,
        "job": "second.py",
        "name": "mine",
        "steps": 10,
        "settings": {"nodes": 2},
        "faults": [],
    }
    (workplace.directory / "plan.json").write_text(json.dumps(plan))
    done = workplace.run(
        "replay", "plan.json", "--times", "3", "--no-twin", "--json", "--report", "runs"
    )
    replayed = json.loads(done.stdout)
    assert [outcome["verdict"] for outcome in replayed["outcomes"]] == [
        "passed",
        "failed",
        "passed",
    ], done.stderr
    assert (done.returncode, replayed["verdict"]) == (1, "failed")
    workplace.await_silence()


@pytest.mark.costly
def test_a_suite_run_tells_its_verdict(workplace: Workplace) -> None:
    """The status of ``chaoskit test`` is that of the tests."""
    (workplace.directory / "test_two.py").write_text(
        "def test_one(): pass\ndef test_two(): assert False\n"
    )
    selections = ("one", "two", "no")
    with ThreadPoolExecutor() as pool:
        runs = pool.map(
            lambda selection: workplace.run("test", "test_two.py", "-k", selection, "--json"),
            selections,
        )
    codes = dict(zip(selections, runs, strict=True))
    assert {selection: done.returncode for selection, done in codes.items()} == {
        "one": 0,
        "two": 1,
        "no": 2,
    }
    assert json.loads(codes["two"].stdout)["outcomes"] == []


@pytest.mark.parametrize(
    "command", [["-m", "chaoskit", "cleanup"], ["-m", "chaoskit.substrate.undo"]]
)
def test_cleanup_ends_what_a_dead_launcher_left(workplace: Workplace, command: list[str]) -> None:
    """Cleanup ends a process in the undo log of a launcher that is dead, like its guard."""
    left = subprocess.Popen(["sleep", "600"])
    code = (
        "import os, signal; from chaoskit.substrate.undo import KillEntry, UndoLog\n"
        f"undo = UndoLog(); undo.plan(KillEntry({left.pid}, {start_ticks(left.pid)}))\n"
        "os.kill(undo.guard_pid, signal.SIGKILL); os.waitpid(undo.guard_pid, 0); os._exit(9)"
    )
    how: dict[str, Any] = {"env": workplace.environment, "capture_output": True, "text": True}
    before = subprocess.run(
        [sys.executable, *command], **how, check=False
    )  # leftovers of other sessions may not be put back
    subprocess.run([sys.executable, "-c", code], **how, check=False)
    done = subprocess.run([sys.executable, *command], **how, check=False)
    assert done.returncode == before.returncode, done.stderr
    assert f"ended pid {left.pid}" in done.stdout
    assert left.wait(LIMIT_S) == -signal.SIGKILL


def test_the_catalogue_tells_parameters(workplace: Workplace) -> None:
    """The catalogue lists every fault with its parameters."""
    faults = {
        fault["name"]: fault
        for fault in json.loads(workplace.run("faults", "--json").stdout)["faults"]
    }
    assert {"Kill", "Hang", "NaN", "Raise"} <= set(faults)
    parameters = {parameter["name"]: parameter for parameter in faults["Hang"]["parameters"]}
    assert parameters["rank"]["required"]
    assert parameters["how"]["default"] == "stop"
    assert all(parameter["meaning"] for parameter in parameters.values())
    listed = workplace.run("faults").stdout
    assert all(name in listed for name in faults)


def test_one_fault_is_told_whole(workplace: Workplace) -> None:
    """The page of a fault names what it imitates and whether it works here; an unknown name is
    refused.
    """
    shown = " ".join(workplace.run("faults", "straggle").stdout.split())
    for text in (
        "effective",
        "ByteRobust: CPU overload, 6,095 (11.0 %)",
        "delay_ms=20.0",
        "faults=[Straggle(",
    ):
        assert text in shown
    (alone,) = json.loads(workplace.run("faults", "Straggle", "--json").stdout)["faults"]
    assert (alone["name"], alone["here"]["state"] in ("yes", "in part")) == ("Straggle", True)
    refused = workplace.run("faults", "Explode")
    assert refused.returncode == 2
    assert "NAME Explode: use one of Kill" in refused.stderr


@pytest.mark.costly
def test_the_doctor_tells_what_is_missing(workplace: Workplace) -> None:
    """``chaoskit doctor`` prints all findings, and whether training can run here."""
    done = workplace.run("doctor", "--json")
    examined = json.loads(done.stdout)
    assert (done.returncode, examined["ok"]) == (0, True), "these tests run here, so the core can"
    shown = workplace.run("doctor").stdout
    assert all(finding["name"] in shown for finding in examined["findings"])
    assert "training and recovery can run here" in shown
    workplace.await_silence()


def test_a_doctor_without_torch(workplace: Workplace) -> None:
    """The doctor works without torch, which it then reports as missing.

    A module that is None cannot be imported.
    """
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['doctor', '--json']\n"
    code += "from chaoskit.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=workplace.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1, done.stderr
    assert (findings["torch"]["state"], findings["gloo"]["state"]) == ("missing", "missing")
    assert findings["memfd"]["state"] == "ok"
    assert "'torch>=2.9'" in findings["torch"]["remedy"]


def test_help_needs_no_torch(workplace: Workplace) -> None:
    """Help and version do not import torch."""
    assert workplace.run("--version").stdout.startswith("chaoskit ")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *workplace.command("launch", "--help")[1:]],
        env=workplace.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "chaoskit launch train.py" in done.stdout
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


# -- what the view knows ---------------------------------------------------------------------------


class Story:
    """A progress view that is fed a coordinator's messages; two nodes, with a second between
    messages.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.progress = Progress(0.0, steps=100)
        self.send(Welcome(RunConfig(job=JobSpec("train.py"), nodes=2, spares=1), term=1, pid=1))

    def send(self, message: Any) -> list[str]:
        self.now_s += 1.0
        return [note.text for note in self.progress.handle(message, self.now_s)]

    def plan(self, generation: int, *workers: str) -> list[str]:
        members = [
            Member(rank, worker, worker[:-2], Endpoint("", "", 0, 0, -1), (rank,))
            for rank, worker in enumerate(workers)
        ]
        return self.send(Plan(generation, tuple(members), True))

    def beat(self, worker: str, generation: int, step: int) -> list[str]:
        return self.send(
            Heartbeat(worker[:-2], (Beat(worker, generation, 0, step, 3, 1.0, 0.0, step, 0.5),))
        )

    def lose(self, worker: str) -> list[str]:
        return self.send(WorkerLost(worker, worker[:-2], "killed", "killed by SIGKILL", 0))


def test_a_recovery_ends_with_a_step_that_is_certainly_new() -> None:
    """A recovery ends with the second step after it: the first may have been committed before the
    loss.
    """
    story = Story()
    story.plan(1, "node0.0", "node1.0")
    story.beat("node0.0", 1, 7)
    assert story.lose("node1.0") == ["rank 1 (node1.0) lost: killed by SIGKILL"]
    story.plan(2, "node0.0", "node0.1")
    assert (
        story.beat("node0.0", 2, 8) == []
    )  # the step may have been committed before the loss: heartbeats lag behind
    assert story.beat("node0.0", 2, 9) == ["step 9 committed, at full strength, 3 s after the loss"]
    assert story.progress.recoveries == [3.0]


def test_a_resumed_run_says_from_where() -> None:
    """The first line names the step and the snapshot; the rate at the end counts only what was
    trained.
    """
    story = Story()
    stored = OfferedSnapshot(
        "", "", 200, 1, 10, "", Endpoint("", "", 0, 0, -1), tier="disk", path="ck/step-200"
    )
    member = Member(0, "node0.0", "node0", Endpoint("", "", 0, 0, -1), (0,))
    assert story.send(Plan(1, (member,), True, restore=(stored,))) == [
        "1 rank train, from step 200 on: ck/step-200"
    ]
    assert story.progress.resumed_from == 200


def test_full_strength_is_told_when_the_world_is_whole_again() -> None:
    """The view reports when the world has its full size again."""
    story = Story()
    story.plan(1, "node0.0", "node1.0")
    story.lose("node1.0")
    assert story.plan(2, "node0.0") == ["generation 2: 1 rank go on"]
    story.beat("node0.0", 2, 1)
    assert story.beat("node0.0", 2, 2) == ["step 2 committed, with 1 rank, 3 s after the loss"]
    assert story.plan(3, "node0.0", "node1.1") == ["generation 3: 2 ranks, 1 joined"]
    story.beat("node0.0", 3, 2)
    assert story.beat("node0.0", 3, 3) == ["full strength again after 6 s"]


def test_the_same_failure_again_and_again_is_told_three_times() -> None:
    """A failure that repeats is reported three times."""
    story = Story()
    printed = [story.lose(f"node0.{number}") for number in range(5)]
    assert [len(notes) for notes in printed] == [1, 1, 1, 0, 0]
    assert printed[2][0].endswith("further ones are not shown")
