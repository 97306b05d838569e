"""Undo: what a killed launcher left behind is put back, and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import LIMIT_S, wait_until

from chaoskit import osprocess
from chaoskit.substrate.undo import Repair, UndoLog, describe, left_behind, state_directory, sweep

# A launcher: plans an undo for each of its children, breaks them, says so, and waits to be killed.
LAUNCHER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from chaoskit.osprocess import start_ticks
from chaoskit.substrate.undo import UndoLog

undo = UndoLog(Path(sys.argv[1]))
pids = {}
for role in ("stopped", "leftover", "put back"):
    pids[role] = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    entry = undo.plan(
        "kill" if role == "leftover" else "continue", pid=pids[role], ticks=start_ticks(pids[role])
    )
    if role != "leftover":
        os.kill(pids[role], signal.SIGSTOP)
        os.waitpid(pids[role], os.WUNTRACED)
    if role == "put back":
        undo.done(entry)
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""


class Launcher:
    """A real launcher process and what it broke."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.pids: dict[str, int] = json.loads(self.process.stdout.readline())
        self.ticks = {pid: osprocess.start_ticks(pid) for pid in self.pids.values()}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        for pid, ticks in self.ticks.items():
            osprocess.kill_if_same(pid, ticks, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], Launcher]]:
    """Starts launchers that keep their undo files in the test's directory; ends them and their children."""
    started: list[Launcher] = []

    def start() -> Launcher:
        started.append(Launcher(tmp_path))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no launcher has started."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def await_state(pid: int, wanted: str) -> None:
    """Wait until the kernel shows the process in one of the states."""
    wait_until(lambda: (osprocess.state(pid) or "gone") in wanted, f"state {wanted} of {pid}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    await_state(process.pid, "T")


def files(directory: Path) -> list[Path]:
    return sorted((directory / "undo").glob("*"))


def test_what_a_killed_launcher_broke_is_put_back(
    tmp_path: Path, launch: Callable[[], Launcher], sleeper: subprocess.Popen[bytes]
) -> None:
    """The janitor continues and ends exactly what is written down as open; what is done or foreign stays as it is."""
    launcher = launch()
    stop(sleeper)
    for role in ("stopped", "put back"):
        assert osprocess.state(launcher.pids[role]) == "T"
    launcher.kill()
    repairs = sweep(tmp_path)
    assert repairs == [
        Repair("continue", f"pid {launcher.pids['stopped']}", True),
        Repair("kill", f"pid {launcher.pids['leftover']}", True),
    ]
    await_state(launcher.pids["stopped"], "S")
    wait_until(lambda: osprocess.is_ending(launcher.pids["leftover"]), "the end of what was left over")
    assert osprocess.state(launcher.pids["put back"]) == "T", "its entry was marked as done"
    assert osprocess.state(sleeper.pid) == "T", "no launcher wrote that this is its own"
    assert files(tmp_path) == []


def test_a_second_sweep_finds_nothing(tmp_path: Path, launch: Callable[[], Launcher]) -> None:
    """What was put back once is not put back again: a process that is stopped later stays stopped."""
    launcher = launch()
    launcher.kill()
    assert len(sweep(tmp_path)) == 2
    await_state(launcher.pids["stopped"], "S")
    os.kill(launcher.pids["stopped"], signal.SIGSTOP)
    await_state(launcher.pids["stopped"], "T")
    assert sweep(tmp_path) == []
    assert osprocess.state(launcher.pids["stopped"]) == "T"


def test_a_live_launchers_work_is_left_alone(tmp_path: Path, launch: Callable[[], Launcher]) -> None:
    """While a launcher lives its entries are its own, even when another one's are being undone."""
    alive, dead = launch(), launch()
    dead.kill()
    assert {repair.target for repair in sweep(tmp_path)} == {
        f"pid {dead.pids['stopped']}",
        f"pid {dead.pids['leftover']}",
    }
    assert osprocess.state(alive.pids["stopped"]) == "T"
    await_state(alive.pids["leftover"], "S")
    assert len(files(tmp_path)) == 1
    alive.process.send_signal(signal.SIGSTOP)
    await_state(alive.process.pid, "T")
    assert sweep(tmp_path) == [], "a stopped launcher is not dead"
    assert osprocess.state(alive.pids["stopped"]) == "T"


def test_a_launcher_that_was_not_reaped_is_dead(tmp_path: Path, launch: Callable[[], Launcher]) -> None:
    """In a container without an init a killed launcher stays a zombie; it cleans up no more than a reaped one."""
    launcher = launch()
    launcher.process.send_signal(signal.SIGKILL)
    await_state(launcher.process.pid, "Z")
    assert len(sweep(tmp_path)) == 2
    await_state(launcher.pids["stopped"], "S")


def dead_launchers_file(directory: Path, *lines: str) -> Path:
    """An undo file whose launcher existed once: a child that has ended, under its true pid and start time."""
    with subprocess.Popen(["true"]) as launcher:
        pid = launcher.pid
        await_state(pid, "Z")
        ticks = osprocess.start_ticks(pid)
    (directory / "undo").mkdir(exist_ok=True)
    path = directory / "undo" / f"{pid}-{ticks}-0.jsonl"
    path.write_text("".join(lines))
    return path


def entry(number: int, act: str, pid: int, ticks: int | None) -> str:
    return json.dumps({"entry": number, "act": act, "pid": pid, "ticks": ticks}) + "\n"


@pytest.mark.parametrize("act", ["kill", "continue"])
@pytest.mark.parametrize("wrong", [1, None], ids=["other start time", "no start time"])
def test_a_reused_pid_is_not_touched(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], act: str, wrong: int | None
) -> None:
    """A process that only has the number of one that is gone is neither ended nor continued."""
    stop(sleeper)
    ticks = osprocess.start_ticks(sleeper.pid)
    assert ticks is not None
    dead_launchers_file(tmp_path, entry(1, act, sleeper.pid, ticks + wrong if wrong else None))
    assert sweep(tmp_path) == [Repair(act, f"pid {sleeper.pid}", False)]
    assert osprocess.state(sleeper.pid) == "T"
    assert sleeper.poll() is None
    dead_launchers_file(tmp_path, entry(1, "continue", sleeper.pid, ticks))
    assert sweep(tmp_path) == [Repair("continue", f"pid {sleeper.pid}", True)], "with the right one it is"
    await_state(sleeper.pid, "S")


def test_a_torn_last_line_does_no_harm(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Wherever the last entry was cut off, those before it are undone and it counts as never written."""
    stop(sleeper)
    ticks = osprocess.start_ticks(sleeper.pid)
    last = entry(2, "kill", sleeper.pid, ticks)
    for cut in range(1, len(last) - 1):
        dead_launchers_file(tmp_path, entry(1, "continue", sleeper.pid, ticks), last[:cut])
        assert sweep(tmp_path) == [Repair("continue", f"pid {sleeper.pid}", True)]
        await_state(sleeper.pid, "S")
        stop(sleeper)
    assert sleeper.poll() is None


GARBAGE = {
    "bytes that are no text": b"\xff\x00\x1b[31m garbage",
    "text that is no JSON": b"{'entry': 2}",
    "JSON that is no entry": b"[5]",
    "an act without its target": b'{"entry": 2, "act": "kill"}',
    "a target of the wrong kind": b'{"entry": 2, "act": "kill", "pid": "1", "ticks": 2}',
    "an act that is not known": b'{"entry": 2, "act": "burn", "pid": 1, "ticks": 2}',
    "an act that is no text": b'{"entry": 2, "act": 5}',
    "a number that is none": b'{"done": [1]}',
    "an empty line": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_damaged_line_is_told_and_the_others_are_undone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], garbage: bytes
) -> None:
    """What can be read is put back once; the damaged line stays on disk, and each janitor names it until it is gone."""
    stop(sleeper)
    path = dead_launchers_file(tmp_path)
    good = entry(1, "continue", sleeper.pid, osprocess.start_ticks(sleeper.pid)).encode()
    path.write_bytes(garbage + b"\n" + good + garbage + b"\n")
    named = f"{path}: line 1 and 1 more cannot be read, and was not put back: {repr(garbage[:60])[1:]}"
    assert left_behind(tmp_path)[0] == f"continue {sleeper.pid}"
    assert left_behind(tmp_path)[1].startswith(named)
    repaired, damaged = sweep(tmp_path)
    assert repaired == Repair("continue", f"pid {sleeper.pid}", True)
    assert (damaged.act, damaged.target, damaged.repaired) == ("damaged", str(path), False)
    assert describe(damaged).startswith(named)
    await_state(sleeper.pid, "S")

    stop(sleeper)
    assert [one.act for one in sweep(tmp_path)] == ["damaged"], "what was put back once is not put back again"
    assert osprocess.state(sleeper.pid) == "T"
    path.unlink()
    assert left_behind(tmp_path) == []


def test_garbage_at_the_end_is_no_torn_entry(tmp_path: Path) -> None:
    """Bytes that no entry begins with are told, with or without a newline behind them; zeros are a torn write."""
    path = dead_launchers_file(tmp_path)
    path.write_bytes(b"\xff\xff")
    assert [one.act for one in sweep(tmp_path)] == ["damaged"]
    path.write_bytes(bytes(512))
    assert sweep(tmp_path) == []


def test_an_empty_undo_log_says_that_nothing_was_broken(tmp_path: Path) -> None:
    """A launcher that was killed before it broke anything leaves an empty file, which the janitor removes."""
    dead_launchers_file(tmp_path)
    assert left_behind(tmp_path) == sweep(tmp_path) == []
    assert files(tmp_path) == []


def test_a_directory_in_place_of_an_undo_log_stops_no_janitor(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """It is named and left alone; the undo logs beside it are undone."""
    path = dead_launchers_file(tmp_path)
    path.unlink()
    path.mkdir()
    stop(sleeper)
    dead_launchers_file(tmp_path, entry(1, "continue", sleeper.pid, osprocess.start_ticks(sleeper.pid)))
    told = [describe(repair) for repair in sweep(tmp_path)]
    assert [line for line in told if line.startswith(f"{path}: Is a directory: nothing that it lists was put back")]
    assert f"continued pid {sleeper.pid}, left stopped" in told
    assert files(tmp_path) == [path]


def test_a_file_whose_name_is_of_no_launcher_is_undone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """No process is known that would put back what it lists."""
    stop(sleeper)
    path = dead_launchers_file(tmp_path, entry(1, "continue", sleeper.pid, osprocess.start_ticks(sleeper.pid)))
    path.rename(path.with_name("renamed by hand.jsonl"))
    assert sweep(tmp_path) == [Repair("continue", f"pid {sleeper.pid}", True)]
    assert files(tmp_path) == []


@pytest.mark.parametrize("command", [["chaoskit.substrate.undo"], ["chaoskit", "cleanup"], ["chaoskit", "doctor"]])
def test_no_command_fails_on_a_damaged_undo_log(tmp_path: Path, command: list[str]) -> None:
    """Each says in one line which file is damaged, and ends as it does without it."""
    path = dead_launchers_file(tmp_path)
    path.write_bytes(b"\xff\n")
    (tmp_path / "chaoskit").symlink_to(tmp_path)
    environment = dict(os.environ, XDG_STATE_HOME=str(tmp_path), COLUMNS="500")
    ran = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    (line,) = [one for one in ran.stdout.splitlines() if f"{path.name}: line 1 cannot be read" in one]
    assert str(tmp_path) in line
    assert "Traceback" not in ran.stderr


def test_the_janitor_tells_a_program_what_is_damaged(tmp_path: Path) -> None:
    """With --json each repair says what could not be put back."""
    path = dead_launchers_file(tmp_path)
    path.write_bytes(b"\xff\n")
    (tmp_path / "chaoskit").symlink_to(tmp_path)
    command = [sys.executable, "-m", "chaoskit", "cleanup", "--json"]
    ran = subprocess.run(
        command, env=dict(os.environ, XDG_STATE_HOME=str(tmp_path)), capture_output=True, timeout=LIMIT_S, check=True
    )
    (repair,) = json.loads(ran.stdout)["repairs"]
    assert (repair["act"], repair["repaired"]) == ("damaged", False)
    assert Path(repair["target"]).name == path.name
    assert repair["problem"].startswith("line 1 cannot be read")


def test_what_is_gone_or_runs_again_needs_no_repair(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Entries whose target ended or was continued meanwhile are reported as such, also in words."""
    ticks = osprocess.start_ticks(sleeper.pid)
    dead_launchers_file(tmp_path, entry(1, "continue", sleeper.pid, ticks))
    (repair,) = sweep(tmp_path)
    assert repair == Repair("continue", f"pid {sleeper.pid}", False)
    assert describe(repair) == f"continue pid {sleeper.pid}: nothing left to do"
    sleeper.kill()
    sleeper.wait(LIMIT_S)
    dead_launchers_file(tmp_path, entry(1, "kill", sleeper.pid, ticks))
    assert sweep(tmp_path) == [Repair("kill", f"pid {sleeper.pid}", False)]


def test_repairs_are_described() -> None:
    """A repair that was made says what was found and what became of it."""
    assert describe(Repair("continue", "pid 5", True)) == "continued pid 5, left stopped"
    assert describe(Repair("kill", "pid 5", True)) == "ended pid 5, left running"


def test_a_plan_is_on_disk_before_it_returns(tmp_path: Path) -> None:
    """The entry can be read by others as soon as ``plan`` returns; ``done`` and an orderly end take it back."""
    undo = UndoLog(tmp_path)
    first = undo.plan("continue", pid=1, ticks=2)
    second = undo.plan("kill", pid=3, ticks=4)
    assert first != second
    (path,) = files(tmp_path)
    assert [json.loads(line)["act"] for line in path.read_text().splitlines()] == ["continue", "kill"]
    undo.done(first)
    assert json.loads(path.read_text().splitlines()[-1]) == {"done": first}
    assert sweep(tmp_path) == [], "this process lives"
    undo.close()
    assert files(tmp_path) == []


def test_two_logs_of_one_process_keep_apart(tmp_path: Path) -> None:
    """One log's end takes back nothing that another one of the same process has planned."""
    first, second = UndoLog(tmp_path), UndoLog(tmp_path)
    first.plan("kill", pid=1, ticks=2)
    number = second.plan("kill", pid=3, ticks=4)
    second.done(number)
    second.close()
    (path,) = files(tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"entry": 1, "act": "kill", "pid": 1, "ticks": 2}
    ]
    first.close()


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``XDG_STATE_HOME`` moves it; without it the home directory holds it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert state_directory() == tmp_path / "elsewhere" / "chaoskit"
    assert sweep() == [], "no directory, nothing to undo"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory() == tmp_path / ".local" / "state" / "chaoskit"


def test_the_janitor_can_be_run_by_plain_python(tmp_path: Path, launch: Callable[[], Launcher]) -> None:
    """``python -m chaoskit.substrate.undo`` sweeps and says what it did, without importing torch."""
    (tmp_path / "chaoskit").symlink_to(tmp_path)
    launcher = launch()
    launcher.kill()
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "chaoskit.substrate.undo"],
        env=dict(os.environ, XDG_STATE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert ran.stdout.splitlines() == [
        f"continued pid {launcher.pids['stopped']}, left stopped",
        f"ended pid {launcher.pids['leftover']}, left running",
    ]
    for heavy in ("torch", "msgspec", "numpy"):
        assert f" {heavy}\n" not in ran.stderr
    await_state(launcher.pids["stopped"], "S")
