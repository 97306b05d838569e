"""Tests of undo: the guard or the janitor puts back what a killed run left behind, and touches
nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import LIMIT_S, wait_until

from chaoskit.errors import BadInput, HarnessError
from chaoskit.process import linux
from chaoskit.substrate.undo import (
    CgroupEntry,
    ContinueEntry,
    DirectoryEntry,
    KillEntry,
    Repair,
    RepairOutcome,
    UndoLog,
    describe,
    left_behind,
    runtime_directory,
    sweep,
    temporary_directory,
)
from chaoskit.substrate.undo.guard import command

REPAIRED, NOTHING, KEPT, FAILED = RepairOutcome

# A runner that plans an undo for each child, breaks it, reports, names its guard, and waits to be killed.
RUNNER = """
import json, os, signal, subprocess, sys
from pathlib import Path
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.undo import ContinueEntry, KillEntry, UndoLog

undo = UndoLog(Path(sys.argv[1]))
pids = {}
for role in ("stopped", "leftover", "put back"):
    pid = pids[role] = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    planned = undo.plan((KillEntry if role == "leftover" else ContinueEntry)(pid, start_ticks(pid)))
    if role != "leftover":
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
    if role == "put back":
        planned.done()
print(json.dumps({**pids, "guard": undo.guard_pid}), flush=True)
sys.stdin.read()
undo.close()
print("closed", flush=True)
"""


class Runner:
    """A real runner process, its guard, and the processes that it broke."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.pids: dict[str, int] = json.loads(self.process.stdout.readline())
        self.guard = self.pids.pop("guard")
        self.ticks = {pid: linux.start_ticks(pid) for pid in (*self.pids.values(), self.guard)}

    def kill(self) -> None:
        """Kill the runner as the kernel does when memory is exhausted: the guard notices only by
        its handle of the process.
        """
        self.process.kill()
        self.process.wait(LIMIT_S)

    def kill_both(self) -> None:
        """Kill runner and guard, as when a container is killed or a CI job is cancelled."""
        os.kill(self.guard, signal.SIGKILL)
        self.kill()
        self.await_guard()

    def await_guard(self) -> None:
        """Wait until the guard is gone or a zombie: an ending process may still hold its lock."""
        wait_until(lambda: linux.state(self.guard) in (None, "Z"), "the end of the guard")

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        for pid, ticks in self.ticks.items():
            linux.kill_if_same(pid, ticks, signal.SIGKILL)


def lives(pid: int, ticks: int | None) -> bool:
    return linux.start_ticks(pid) == ticks and not linux.is_ending(pid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Runner]]:
    """Provide a function that starts runners with undo files in the test's directory; end them and
    their processes.
    """
    started: list[Runner] = []

    def start_one() -> Runner:
        started.append(Runner(tmp_path))
        return started[-1]

    yield start_one
    for runner in started:
        runner.end()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Provide a process that no runner has started."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def await_state(pid: int, states: str) -> None:
    """Wait until the kernel shows the process in one of the states."""
    wait_until(lambda: (linux.state(pid) or "gone") in states, f"state {states} of {pid}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    await_state(process.pid, "T")


def files(directory: Path) -> list[Path]:
    return sorted((directory / "undo").glob("*"))


# -- the guard -------------------------------------------------------------------------------------


def test_the_guard_puts_back_what_a_killed_runner_broke(
    tmp_path: Path, start: Callable[[], Runner], sleeper: subprocess.Popen[bytes]
) -> None:
    """The guard continues and ends exactly what is open; completed entries, and processes of
    others, stay as they are.
    """
    runner = start()
    stop(sleeper)
    for role in ("stopped", "put back"):
        assert linux.state(runner.pids[role]) == "T"
    runner.kill()
    runner.await_guard()
    await_state(runner.pids["stopped"], "S")
    wait_until(lambda: linux.is_ending(runner.pids["leftover"]), "the end of what was left over")
    assert linux.state(runner.pids["put back"]) == "T", "its entry was marked as done"
    assert linux.state(sleeper.pid) == "T", "no runner wrote that this is its own"
    assert files(tmp_path) == []


def test_the_guard_outlives_what_ends_a_process_group(
    tmp_path: Path, start: Callable[[], Runner]
) -> None:
    """A Ctrl-C, a closed terminal and SIGTERM reach the runner; the guard has a session of its own
    and stays.
    """
    runner = start()
    assert os.getsid(runner.guard) == runner.guard != os.getsid(runner.process.pid)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(runner.guard, signum)
    assert lives(runner.guard, runner.ticks[runner.guard])
    runner.kill()
    runner.await_guard()
    await_state(runner.pids["stopped"], "S")
    assert files(tmp_path) == []


def test_the_guard_holds_no_output_of_its_runner(start: Callable[[], Runner]) -> None:
    """A reader of a killed runner's output sees its end even while the guard is still at work."""
    runner = start()
    os.kill(runner.guard, signal.SIGSTOP)
    await_state(runner.guard, "T")
    for pid in runner.pids.values():
        linux.kill_if_same(pid, runner.ticks[pid], signal.SIGKILL)
    runner.kill()
    assert runner.process.stdout is not None
    assert runner.process.stderr is not None
    assert runner.process.stdout.read() == runner.process.stderr.read() == b""
    os.kill(runner.guard, signal.SIGCONT)


def test_a_runner_that_ends_in_order_leaves_no_guard_and_no_file(
    tmp_path: Path, start: Callable[[], Runner]
) -> None:
    """``close`` returns once all open entries are put back, the file is removed, and the guard is
    gone.
    """
    runner = start()
    assert runner.process.stdin is not None
    assert runner.process.stdout is not None
    runner.process.stdin.close()
    assert runner.process.stdout.readline() == b"closed\n"
    assert not lives(runner.guard, runner.ticks[runner.guard])
    assert linux.state(runner.pids["stopped"]) == "S"
    assert files(tmp_path) == []


def test_a_guard_that_was_killed_is_replaced_before_the_next_entry(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Every entry has a guard that would put it back."""
    undo = UndoLog(tmp_path)
    undo.plan(ContinueEntry(sleeper.pid, linux.start_ticks(sleeper.pid)))
    first = undo.guard_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: linux.is_ending(first), "the end of the guard")
    undo.plan(ContinueEntry(sleeper.pid, linux.start_ticks(sleeper.pid)))
    assert undo.guard_pid not in (None, first)
    stop(sleeper)
    undo.close()
    await_state(sleeper.pid, "S")


def test_a_runner_without_its_guard_puts_back_itself(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Closing does not depend on the guard."""
    undo = UndoLog(tmp_path)
    undo.plan(ContinueEntry(sleeper.pid, linux.start_ticks(sleeper.pid)))
    stop(sleeper)
    assert undo.guard_pid is not None
    os.kill(undo.guard_pid, signal.SIGKILL)
    undo.close()
    await_state(sleeper.pid, "S")
    assert files(tmp_path) == []


def test_the_guard_is_small_and_knows_no_package(start: Callable[[], Runner]) -> None:
    """The guard loads only the standard library and this package, since it must work in a broken
    environment.
    """
    runner = start()
    maps = Path(f"/proc/{runner.guard}/maps").read_text()
    assert "site-packages" not in maps
    resident_kib = (
        int(Path(f"/proc/{runner.guard}/statm").read_text().split()[1])
        * os.sysconf("SC_PAGESIZE")
        // 1024
    )
    assert resident_kib < 40 * 1024


def test_a_runner_that_dies_while_its_guard_starts_is_undone_all_the_same(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """The runner can no longer read that the guard is ready."""
    stop(sleeper)
    path = abandoned(tmp_path, entry(1, "continue", sleeper.pid, linux.start_ticks(sleeper.pid)))
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(["true"]) as gone:
        pass
    with subprocess.Popen(
        [sys.executable, *command(path, gone.pid)], stdin=subprocess.DEVNULL, stdout=writing
    ) as guard:
        os.close(writing)
        assert guard.wait(LIMIT_S) == 0
    await_state(sleeper.pid, "S")
    assert files(tmp_path) == []


def test_what_cannot_be_put_back_at_the_end_stays_in_the_file(tmp_path: Path) -> None:
    """An orderly end does not forget such an entry; the next start tries again."""
    other = tmp_path / "not ours"
    other.mkdir()
    undo = UndoLog(tmp_path)
    undo.plan(DirectoryEntry(str(other)))
    assert undo.guard_pid is not None
    os.kill(undo.guard_pid, signal.SIGKILL)
    undo.close()
    assert [repair.outcome for repair in sweep(tmp_path)] == [FAILED]
    other.rmdir()
    assert [repair.outcome for repair in sweep(tmp_path)] == [NOTHING]
    assert files(tmp_path) == []


def test_a_process_that_ends_in_order_is_let_do_so(tmp_path: Path) -> None:
    """The process may clean up what it has started, and later entries wait for it. A process that
    does not end is killed.
    """
    code = "import os, sys, time; sys.stdin.read(); time.sleep(0.3); open(sys.argv[1], 'w').close()"
    left = tmp_path / "chaoskit-left"
    left.mkdir()
    script = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom chaoskit.process.linux import start_ticks\n"
        "from chaoskit.substrate.undo import DirectoryEntry, EndEntry, UndoLog\n"
        "undo = UndoLog(Path(sys.argv[1]))\nundo.plan(DirectoryEntry(sys.argv[2]))\n"
        f"helper = subprocess.Popen([sys.executable, '-c', {code!r}, sys.argv[2] + '/late'], stdin=subprocess.PIPE)\n"
        "undo.plan(EndEntry(helper.pid, start_ticks(helper.pid)))\nprint(undo.guard_pid, helper.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(left)], capture_output=True, check=False
    )
    guard, helper = map(int, ran.stdout.split())
    wait_until(lambda: linux.is_ending(guard), "the end of the guard")
    assert linux.is_ending(helper)
    assert not left.exists(), "it was removed before its last user had ended"
    assert files(tmp_path) == []


def test_a_stop_that_is_on_its_way_is_taken_back(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """The signal was sent, but has not stopped the process yet."""
    sent = ContinueEntry(sleeper.pid, linux.start_ticks(sleeper.pid))
    assert sent.undo() == NOTHING
    stop(sleeper)
    assert sent.undo() == REPAIRED
    await_state(sleeper.pid, "S")


def test_a_fork_of_the_runner_does_not_end_its_runs(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """A forked child that unwinds like the runner, as in a test, puts nothing back and plans
    nothing.
    """
    undo = UndoLog(tmp_path)
    undo.plan(ContinueEntry(sleeper.pid, linux.start_ticks(sleeper.pid)))
    stop(sleeper)
    child = os.fork()
    if child == 0:
        try:
            undo.close()
            undo.plan(KillEntry(1, None))
        except HarnessError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert linux.state(sleeper.pid) == "T"
    undo.close()
    await_state(sleeper.pid, "S")


# -- the janitor -----------------------------------------------------------------------------------


def test_the_janitor_puts_back_what_runner_and_guard_left(
    tmp_path: Path, start: Callable[[], Runner], sleeper: subprocess.Popen[bytes]
) -> None:
    """Both were killed at once: the next start finds the file, and does the work of the guard."""
    runner = start()
    stop(sleeper)
    runner.kill_both()
    assert linux.state(runner.pids["stopped"]) == "T"
    assert sweep(tmp_path) == [
        Repair("continue", f"pid {runner.pids['stopped']}", REPAIRED),
        Repair("kill", f"pid {runner.pids['leftover']}", REPAIRED),
    ]
    await_state(runner.pids["stopped"], "S")
    wait_until(lambda: linux.is_ending(runner.pids["leftover"]), "the end of what was left over")
    assert linux.state(runner.pids["put back"]) == "T"
    assert linux.state(sleeper.pid) == "T"
    assert files(tmp_path) == []


def test_a_second_sweep_finds_nothing(tmp_path: Path, start: Callable[[], Runner]) -> None:
    """An entry is put back once: a process that is stopped later stays stopped."""
    runner = start()
    runner.kill_both()
    assert len(sweep(tmp_path)) == 2
    await_state(runner.pids["stopped"], "S")
    os.kill(runner.pids["stopped"], signal.SIGSTOP)
    await_state(runner.pids["stopped"], "T")
    assert sweep(tmp_path) == []
    assert linux.state(runner.pids["stopped"]) == "T"


def test_what_a_live_runner_or_its_guard_answers_for_is_left_alone(
    tmp_path: Path, start: Callable[[], Runner]
) -> None:
    """The entries belong to a runner or guard that lives, stopped or not, even while another file
    is being undone.
    """
    alive, dead, guarded = start(), start(), start()
    dead.kill_both()
    os.kill(guarded.guard, signal.SIGSTOP)
    await_state(guarded.guard, "T")
    guarded.kill()
    assert {repair.target for repair in sweep(tmp_path)} == {
        f"pid {dead.pids['stopped']}",
        f"pid {dead.pids['leftover']}",
    }
    for runner in (alive, guarded):
        assert linux.state(runner.pids["stopped"]) == "T"
        await_state(runner.pids["leftover"], "S")
    assert len(files(tmp_path)) == 2
    alive.process.send_signal(signal.SIGSTOP)
    await_state(alive.process.pid, "T")
    assert sweep(tmp_path) == left_behind(tmp_path) == [], "a stopped runner is not dead"
    os.kill(guarded.guard, signal.SIGCONT)
    guarded.await_guard()
    await_state(guarded.pids["stopped"], "S")


# -- files of runners that are gone ----------------------------------------------------------------


def entry(number: int, act: str, pid: int, ticks: int | None) -> str:
    return json.dumps({"entry": number, "act": act, "pid": pid, "ticks": ticks}) + "\n"


def abandoned(directory: Path, *lines: str, kernel: str = "") -> Path:
    """Write an undo file that no process has locked, and return its path."""
    folder = directory / "undo"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "1-abandoned.jsonl"
    path.write_text("".join([json.dumps({"kernel": kernel or linux.kernel_id()}) + "\n", *lines]))
    return path


@pytest.mark.parametrize("act", ["kill", "continue"])
@pytest.mark.parametrize("wrong", [1, None], ids=["other start time", "no start time"])
def test_a_reused_pid_is_not_touched(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], act: str, wrong: int | None
) -> None:
    """A process that has only the pid of a process that is gone is neither ended nor continued."""
    stop(sleeper)
    ticks = linux.start_ticks(sleeper.pid)
    assert ticks is not None
    abandoned(tmp_path, entry(1, act, sleeper.pid, ticks + wrong if wrong else None))
    assert sweep(tmp_path) == [Repair(act, f"pid {sleeper.pid}", NOTHING)]
    assert linux.state(sleeper.pid) == "T"
    assert sleeper.poll() is None
    abandoned(tmp_path, entry(1, "continue", sleeper.pid, ticks))
    assert sweep(tmp_path) == [Repair("continue", f"pid {sleeper.pid}", REPAIRED)], (
        "with the right one it is"
    )
    await_state(sleeper.pid, "S")


@pytest.mark.parametrize("where", ["another container on this machine", "a boot that is over"])
def test_pids_of_elsewhere_mean_nothing_here(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], where: str
) -> None:
    """Temporary files may be shared with a container, or outlive a boot: pid and start time may be
    equal by chance.
    """
    stop(sleeper)
    boot = (
        linux.boot_id() if where.startswith("another") else "00000000-0000-0000-0000-000000000000"
    )
    left = tmp_path / "chaoskit-left"
    left.mkdir()
    lines = [entry(1, "continue", sleeper.pid, linux.start_ticks(sleeper.pid))]
    lines.append(json.dumps({"entry": 2, "act": "directory", "path": str(left)}) + "\n")
    path = abandoned(tmp_path, *lines, kernel=f"{boot}/pid:[1]")
    repairs = sweep(tmp_path)
    assert linux.state(sleeper.pid) == "T"
    if where.startswith("another"):
        assert repairs == left_behind(tmp_path) == []
        assert path.exists(), "it is for a janitor in that container"
        return
    assert [repair.outcome for repair in repairs] == [NOTHING, REPAIRED]
    assert not left.exists()
    assert not path.exists()


def test_a_torn_last_line_does_no_harm(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Wherever the last entry was cut off, the entries before it are undone, and it counts as never
    written.
    """
    stop(sleeper)
    ticks = linux.start_ticks(sleeper.pid)
    last = entry(2, "kill", sleeper.pid, ticks)
    for cut in range(1, len(last) - 1):
        abandoned(tmp_path, entry(1, "continue", sleeper.pid, ticks), last[:cut])
        assert sweep(tmp_path) == [Repair("continue", f"pid {sleeper.pid}", REPAIRED)]
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
    """Readable entries are put back once; the damaged line stays on disk, and each janitor names it
    until it is gone.
    """
    stop(sleeper)
    path = abandoned(tmp_path)
    good = entry(1, "continue", sleeper.pid, linux.start_ticks(sleeper.pid)).encode()
    path.write_bytes(garbage + b"\n" + good + garbage + b"\n")
    named = (
        f"{path}: line 1 and 1 more cannot be read, and was not put back: {repr(garbage[:60])[1:]}"
    )
    assert left_behind(tmp_path)[0] == f"continue pid {sleeper.pid}"
    assert left_behind(tmp_path)[1].startswith(named)
    repaired, damaged = sweep(tmp_path)
    assert repaired == Repair("continue", f"pid {sleeper.pid}", REPAIRED)
    assert (damaged.act, damaged.target, damaged.outcome) == ("damaged", str(path), FAILED)
    assert describe(damaged).startswith(named)
    await_state(sleeper.pid, "S")

    stop(sleeper)
    assert [repair.act for repair in sweep(tmp_path)] == ["damaged"], (
        "what was put back once is not put back again"
    )
    assert linux.state(sleeper.pid) == "T"
    path.unlink()
    assert left_behind(tmp_path) == []


def test_garbage_at_the_end_is_no_torn_entry(tmp_path: Path) -> None:
    """Bytes that no entry begins with are reported, with or without a newline behind them; zeros
    are a torn write.
    """
    path = abandoned(tmp_path)
    path.write_bytes(b"\xff\xff")
    assert [repair.act for repair in sweep(tmp_path)] == ["damaged"]
    path.write_bytes(bytes(512))
    assert sweep(tmp_path) == []


def test_an_empty_undo_log_says_that_nothing_was_broken(tmp_path: Path) -> None:
    """A runner that was killed before it broke anything leaves an empty file, which the janitor
    removes.
    """
    path = abandoned(tmp_path)
    assert left_behind(tmp_path) == sweep(tmp_path) == []
    path.touch()
    assert sweep(tmp_path) == []
    assert files(tmp_path) == []


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Such a file does not stop the janitor: the other files are undone."""
    path = abandoned(tmp_path)
    path.rename(path.with_name("0-first.jsonl"))
    path.with_name("0-first.jsonl").unlink()
    path.with_name("0-first.jsonl").mkdir()
    abandoned(tmp_path, entry(1, "kill", 2**22 + 5, 1))
    first, second = sweep(tmp_path)
    assert (first.act, first.outcome) == ("damaged", FAILED)
    assert second == Repair("kill", f"pid {2**22 + 5}", NOTHING)


# -- what fails, and what is not ours --------------------------------------------------------------


def test_a_repair_that_failed_keeps_its_entry(tmp_path: Path) -> None:
    """The failure is reported, and the next janitor tries again; a repair that succeeded is not
    done twice.
    """
    left, other = tmp_path / "chaoskit-left", tmp_path / "not ours"
    left.mkdir()
    other.mkdir()
    lines = [
        json.dumps({"entry": n, "act": "directory", "path": str(p)}) + "\n"
        for n, p in ((1, left), (2, other))
    ]
    path = abandoned(tmp_path, *lines)
    assert [repair.outcome for repair in sweep(tmp_path)] == [REPAIRED, FAILED]
    assert path.exists()
    (again,) = sweep(tmp_path)
    assert again == Repair("directory", str(other), FAILED)
    assert (
        describe(again)
        == f"directory {other}: not put back, and it is tried again at the next start"
    )
    other.rmdir()
    assert sweep(tmp_path) == [Repair("directory", str(other), NOTHING)]
    assert files(tmp_path) == []


def test_a_path_that_is_no_control_group_is_not_written(tmp_path: Path) -> None:
    """A forged entry may name any directory, or one behind a link: nothing is written or removed
    there.
    """
    group, home, link = tmp_path / "chaoskit-1-1-1", tmp_path / "home", tmp_path / "chaoskit-1-1-2"
    for directory in (group, home):
        directory.mkdir()
        (directory / "cgroup.procs").write_text("1\n")
    link.symlink_to("/sys/fs/cgroup")
    entries = [CgroupEntry(str(group), str(home)), CgroupEntry(str(link), "/sys/fs/cgroup")]
    lines = [
        json.dumps(
            {"entry": number, "act": "cgroup", "path": entry_fields.path, "home": entry_fields.home}
        )
        + "\n"
        for number, entry_fields in enumerate(entries, 1)
    ]
    abandoned(tmp_path, *lines)
    assert [repair.outcome for repair in sweep(tmp_path)] == [FAILED] * 2
    assert (home / "cgroup.procs").read_text() == "1\n"
    assert group.is_dir()
    assert link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("whose", ["file", "folder"])
def test_another_users_file_is_not_believed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], whose: str
) -> None:
    """Root may run with another user's environment, and must not carry out what that user wrote."""
    path = abandoned(tmp_path, entry(1, "kill", sleeper.pid, linux.start_ticks(sleeper.pid)))
    os.chown(path if whose == "file" else path.parent, 12345, 12345)
    repairs = sweep(tmp_path)
    assert [repair.act for repair in repairs] == (["damaged"] if whose == "file" else [])
    assert sleeper.poll() is None


def test_a_folder_that_others_may_write_into_is_not_believed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Any user could have put the file there; no entry is written to such a folder either."""
    path = abandoned(tmp_path, entry(1, "kill", sleeper.pid, linux.start_ticks(sleeper.pid)))
    path.parent.chmod(0o777)
    assert sweep(tmp_path) == left_behind(tmp_path) == []
    assert sleeper.poll() is None
    with pytest.raises(BadInput, match="others may write into it"):
        UndoLog(tmp_path)


# -- directories -----------------------------------------------------------------------------------


def test_a_temporary_directory_of_a_killed_run_is_removed_unless_it_can_be_judged(
    tmp_path: Path,
) -> None:
    """A directory with a journal is kept, and reported with the command that judges it."""
    empty, judged = tmp_path / "chaoskit-empty", tmp_path / "chaoskit-judged"
    (empty / "001-run").mkdir(parents=True)
    (judged / "001-run" / "journal").mkdir(parents=True)
    lines = [
        json.dumps({"entry": n, "act": "directory", "path": str(p)}) + "\n"
        for n, p in ((1, empty), (2, judged))
    ]
    abandoned(tmp_path, *lines)
    removed, kept = sweep(tmp_path)
    assert (removed.outcome, kept.outcome) == (REPAIRED, KEPT)
    assert not empty.exists()
    assert judged.exists()
    assert f"chaoskit judge {judged}/RUN" in describe(kept)
    assert sweep(tmp_path) == []


def test_a_temporary_directory_is_written_down_before_it_is_made(
    tmp_path: Path, undo: UndoLog
) -> None:
    """The directory is accessible to this user only."""
    path, planned = temporary_directory("test", undo)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (file,) = files(tmp_path)
    assert json.loads(file.read_text().splitlines()[-1]) == {
        "entry": 1,
        "act": "directory",
        "path": str(path),
    }
    path.rmdir()
    planned.done()


# -- where files are -------------------------------------------------------------------------------


def test_the_runtime_directory_is_of_this_boot_and_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The directory is ``$XDG_RUNTIME_DIR``; if it is missing or another user's, a directory of
    this machine is used.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert runtime_directory() == tmp_path / "run" / "chaoskit"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    own = Path("/run/chaoskit") if os.geteuid() == 0 else Path(os.environ.get("TMPDIR") or "/tmp")
    assert runtime_directory().is_relative_to(own)
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        (foreign / "chaoskit").mkdir(parents=True)
        os.chown(foreign / "chaoskit", 12345, 12345)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(foreign))
        assert runtime_directory() == own


def test_a_plan_is_in_the_file_before_it_returns(tmp_path: Path, undo: UndoLog) -> None:
    """Other processes can read the entries once ``plan`` returns; ``done`` takes all entries of one
    act back.
    """
    first = undo.plan(ContinueEntry(1, 2), KillEntry(3, 4))
    undo.plan(KillEntry(5, 6))
    (path,) = files(tmp_path)
    assert [json.loads(line).get("act") for line in path.read_text().splitlines()] == [
        None,
        "continue",
        "kill",
        "kill",
    ]
    first.done()
    assert [json.loads(line) for line in path.read_text().splitlines()[-2:]] == [
        {"done": 1},
        {"done": 2},
    ]
    assert sweep(tmp_path) == [], "this process lives"


def test_two_logs_of_one_process_keep_apart(tmp_path: Path) -> None:
    """The end of one log takes back nothing that another log of the process has planned."""
    first, second = UndoLog(tmp_path), UndoLog(tmp_path)
    first.plan(KillEntry(2**22 + 1, 2))
    second.plan(KillEntry(2**22 + 3, 4)).done()
    second.close()
    (path,) = files(tmp_path)
    assert json.loads(path.read_text().splitlines()[-1]) == {
        "entry": 1,
        "act": "kill",
        "pid": 2**22 + 1,
        "ticks": 2,
    }
    first.close()


def test_a_log_without_an_entry_leaves_and_starts_nothing(tmp_path: Path) -> None:
    """A harness that breaks nothing has no guard."""
    undo = UndoLog(tmp_path)
    assert undo.guard_pid is None
    assert files(tmp_path) == []
    undo.close()


# -- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["chaoskit.substrate.undo"], ["chaoskit", "cleanup"], ["chaoskit", "doctor"]]
)
def test_no_command_fails_on_a_damaged_undo_log(tmp_path: Path, command: list[str]) -> None:
    """Each command names the damaged file in one line, and ends as it does without the file."""

    def run() -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path), COLUMNS="500")
        whole = [sys.executable, "-m", *command]
        return subprocess.run(
            whole, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    (tmp_path / "chaoskit").mkdir(mode=0o700)
    without = run()
    path = abandoned(tmp_path / "chaoskit")
    path.write_bytes(b"\xff\n")
    ran = run()
    assert ran.returncode == without.returncode, ran.stderr
    (line,) = [
        printed
        for printed in ran.stdout.splitlines()
        if f"{path.name}: line 1 cannot be read" in printed
    ]
    assert str(tmp_path) in line
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", [["chaoskit.substrate.undo"], ["chaoskit", "cleanup"]])
def test_a_command_that_could_not_put_back_says_so_by_its_status(
    tmp_path: Path, command: list[str]
) -> None:
    """A script that cleans a machine must notice that something is left."""
    (tmp_path / "chaoskit").mkdir(mode=0o700)
    group = tmp_path / "chaoskit-1-1-1"
    group.mkdir()
    abandoned(
        tmp_path / "chaoskit",
        json.dumps({"entry": 1, "act": "cgroup", "path": str(group), "home": str(tmp_path)}) + "\n",
    )
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path), COLUMNS="500")
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert f"cgroup {group}: not put back" in ran.stdout


def test_the_janitor_tells_a_program_what_is_damaged(tmp_path: Path) -> None:
    """The repairs of --json name what could not be put back."""
    (tmp_path / "chaoskit").mkdir(mode=0o700)
    path = abandoned(tmp_path / "chaoskit")
    path.write_bytes(b"\xff\n")
    command = [sys.executable, "-m", "chaoskit", "cleanup", "--json"]
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path))
    ran = subprocess.run(
        command, env=environment, capture_output=True, timeout=LIMIT_S, check=False
    )
    (repair,) = [
        candidate
        for candidate in json.loads(ran.stdout)["repairs"]
        if candidate["target"] == str(path)
    ]
    assert (repair["act"], repair["outcome"]) == ("damaged", "failed")
    assert repair["detail"].startswith("line 1 cannot be read")


def test_what_is_gone_or_runs_again_needs_no_repair(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Entries with a target that ended or was continued meanwhile are reported as such, also in
    words.
    """
    ticks = linux.start_ticks(sleeper.pid)
    abandoned(tmp_path, entry(1, "continue", sleeper.pid, ticks))
    (repair,) = sweep(tmp_path)
    assert repair == Repair("continue", f"pid {sleeper.pid}", NOTHING)
    assert describe(repair) == f"continue pid {sleeper.pid}: nothing left to do"
    sleeper.kill()
    sleeper.wait(LIMIT_S)
    abandoned(tmp_path, entry(1, "kill", sleeper.pid, ticks))
    assert sweep(tmp_path) == [Repair("kill", f"pid {sleeper.pid}", NOTHING)]


def test_repairs_are_described() -> None:
    """The description of a repair has the finding and its outcome."""
    assert describe(Repair("continue", "pid 5", REPAIRED)) == "continued pid 5, left stopped"
    assert describe(Repair("kill", "pid 5", REPAIRED)) == "ended pid 5, left running"
    assert describe(Repair("container", "x", REPAIRED)) == "removed container x, left behind"
    assert describe(Repair("cgroup", "/x", REPAIRED)) == "removed /x, left behind"
    assert describe(Repair("cgroup", "/x", FAILED, "busy")) == "cgroup /x: not put back: busy"


def test_the_janitor_can_be_run_by_plain_python(tmp_path: Path) -> None:
    """``python -m chaoskit.substrate.undo`` sweeps and prints its repairs, without importing
    torch.
    """
    runtime = tmp_path / "chaoskit"
    runtime.mkdir(mode=0o700)
    runner = Runner(runtime)
    runner.kill_both()
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "chaoskit.substrate.undo"],
        env=dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    runner.end()
    assert ran.stdout.splitlines()[:2] == [
        f"continued pid {runner.pids['stopped']}, left stopped",
        f"ended pid {runner.pids['leftover']}, left running",
    ]
    for heavy in ("torch", "msgspec", "numpy"):
        assert f" {heavy}\n" not in ran.stderr
