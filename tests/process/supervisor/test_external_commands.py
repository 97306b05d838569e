"""Tests of external commands on machines: real commands on real files, run here and over a driver's
connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.remote.client_line import ClientLine
from chaoskit.experiment.remote.messages import (
    AskAble,
    ExternalCommandDone,
    FromDriver,
    RunExternalCommand,
    UndoExternalCommand,
)
from chaoskit.substrate.core.external_commands import LocalCommands
from chaoskit.substrate.kubernetes.machines import machine_commands
from chaoskit.substrate.kubernetes.machines.machine_commands import Lever
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire import frames


def flag(directory: Path) -> Lever:
    """Return a command that makes a file with the name of the machine, and an undo that removes it
    if it exists.
    """
    path = f"{directory}/{{machine}}"
    return Lever(do=("touch", path), undo=("rm", "-f", path))


def failing(directory: Path) -> Lever:
    """Return a command that has an effect and fails then."""
    return Lever(
        do=("sh", "-c", f"touch {directory}/m1; echo no bmc of m1 >&2; exit 3"),
        undo=flag(directory).undo,
    )


@pytest.fixture
def undo() -> UndoLog:
    return UndoLog()


# -- levers ----------------------------------------------------------------------------------------


def test_a_lever_is_pulled_and_put_back(undo: UndoLog, tmp_path: Path) -> None:
    put_back = machine_commands.pull("flag", flag(tmp_path), "m1", undo)
    assert (tmp_path / "m1").exists()
    put_back()
    assert not (tmp_path / "m1").exists()


def test_a_command_that_fails_is_told_and_put_back_at_once(undo: UndoLog, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="lever cut ended with status 3: no bmc of m1"):
        machine_commands.pull("cut", failing(tmp_path), "m1", undo)
    assert not (tmp_path / "m1").exists()


def test_a_command_that_is_not_there_is_told(undo: UndoLog) -> None:
    with pytest.raises(HarnessError, match=r"lever cut.*no-such-command"):
        machine_commands.pull("cut", Lever(do=("no-such-command",), undo=("true",)), "m1", undo)


_PULLS = """
import sys, time
from pathlib import Path
from chaoskit.substrate.kubernetes.machines.machine_commands import Lever, pull
from chaoskit.substrate.undo import UndoLog
path = f"{sys.argv[1]}/{{machine}}"
pull("flag", Lever(do=("touch", path), undo=("rm", "-f", path)), "m1", UndoLog())
print("pulled", flush=True)
time.sleep(60)
"""


@pytest.mark.promise("**What undoes a command is written down before it runs**")
def test_the_guard_of_a_killed_process_puts_it_back(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PULLS, str(tmp_path)], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pulled\n"
        assert (tmp_path / "m1").exists()
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not (tmp_path / "m1").exists(), "the undo of the lever")


_PULLS_SLOWLY = """
import sys
from chaoskit.substrate.kubernetes.machines.machine_commands import Lever, pull
from chaoskit.substrate.undo import UndoLog
at = sys.argv[1]
slow = f"echo $$ > {at}/new; mv {at}/new {at}/pid; read _ < {at}/pipe"
pull("slow", Lever(do=("sh", "-c", slow), undo=("touch", f"{at}/undone")), "", UndoLog())
"""


def test_a_command_does_not_outlive_the_process_that_runs_it(tmp_path: Path) -> None:
    """A command that outlived its process would take effect after its undo."""
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", _PULLS_SLOWLY, str(tmp_path)]) as process:
        wait_until((tmp_path / "pid").exists, "the command")
        process.send_signal(signal.SIGKILL)
    wait_until((tmp_path / "undone").exists, "the undo of the lever")
    command = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(command), "the end of the command")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "cut: power off",
        "cut: {do: [a]}",
        "cut: {do: [], undo: [b]}",
        "cut: {do: [a], undo: [b], x: 1}",
        "{",
    ],
)
def test_a_file_without_levers_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "levers.yaml").write_text(text)
    with pytest.raises(BadInput, match="levers"):
        machine_commands.read(str(tmp_path / "levers.yaml"))


def test_a_file_of_levers_is_read(tmp_path: Path) -> None:
    (tmp_path / "levers.yaml").write_text(
        "cut: {do: [cut, '{machine}'], undo: [mend, '{machine}']}"
    )
    assert machine_commands.read(str(tmp_path / "levers.yaml")) == {
        "cut": Lever(("cut", "{machine}"), ("mend", "{machine}"))
    }


# -- external commands that this process runs ----------------------------------------------------------------


class Book:
    """A record of the commands that were done and put back, in order."""

    def __init__(self, fails: str = "", fails_to_end: str = "") -> None:
        self.lines: list[str] = []
        self._fails, self._fails_to_end = fails, fails_to_end

    def do(self, name: str, machine: str) -> Callable[[], None]:
        if name == self._fails:
            raise HarnessError(f"{name} cannot be done")
        self.lines.append(f"{name} {machine}")

        def put_back() -> None:
            if name == self._fails_to_end:
                raise HarnessError(f"{name} cannot be put back")
            self.lines.append(f"{name} back")

        return put_back


def test_a_command_is_run_and_undone_once() -> None:
    book = Book()
    commands = LocalCommands(book.do)
    number = commands.begin("cut", "m1")
    wait_until(lambda: commands.is_done(number), "the command")
    commands.end(number)
    wait_until(lambda: book.lines == ["cut m1", "cut back"], "its end")
    commands.settle()
    assert book.lines == ["cut m1", "cut back"]


def test_the_last_command_is_undone_first() -> None:
    book = Book()
    commands = LocalCommands(book.do)
    for number, name in enumerate(("cut", "cordon"), start=1):
        assert commands.do(number, name, "m1", float("inf")) == ""
    commands.settle()
    assert book.lines == ["cut m1", "cordon m1", "cordon back", "cut back"]


def test_one_that_fails_says_so_and_is_not_put_back() -> None:
    book = Book(fails="cut")
    commands = LocalCommands(book.do)
    number = commands.begin("cut", "m1")
    with pytest.raises(HarnessError, match="cut cannot be done"):
        wait_until(lambda: commands.is_done(number), "the command")
    commands.settle()
    assert book.lines == []


def test_whatever_goes_wrong_is_told_to_what_waits_for_it() -> None:
    """The client is told of any error, such as a file of levers that vanished: it would wait for
    ever otherwise.
    """

    def breaks(name: str, machine: str) -> Callable[[], None]:
        raise OSError("no such file")

    commands = LocalCommands(breaks)
    assert commands.do(1, "cut", "m1", float("inf")) == "no such file"
    commands.settle()


def test_what_cannot_be_put_back_is_told_when_all_others_were() -> None:
    book = Book(fails_to_end="cut")
    commands = LocalCommands(book.do)
    commands.do(1, "cordon", "m1", float("inf"))
    commands.do(2, "cut", "m1", float("inf"))
    with pytest.raises(HarnessError, match="could not be undone: cut cannot be put back"):
        commands.settle()
    assert book.lines[-1] == "cordon back"


def test_one_that_lasts_for_a_while_is_put_back_without_a_word() -> None:
    book = Book()
    commands = LocalCommands(book.do)
    commands.do(1, "stop", "", 0.05)
    wait_until(lambda: book.lines == ["stop ", "stop back"], "its own end")
    commands.settle()
    assert book.lines == ["stop ", "stop back"]


# -- external commands of a driver ---------------------------------------------------------------------------


class Client:
    """The client's end of a driver's connection."""

    def __init__(self) -> None:
        self.line, driver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.driver = ClientLine(driver_end)
        self._driver_end = driver_end
        self._splitter = frames.FrameSplitter(frames.decoder(FromDriver))

    def received(self) -> list[FromDriver]:
        return list(self._splitter.feed(self.line.recv(2**16)))

    def send(self, message: AskAble | ExternalCommandDone) -> None:
        self.line.send(frames.encode(message))

    def close(self) -> None:
        self.line.close()
        self._driver_end.close()


@pytest.fixture
def client() -> Client:
    return Client()


def test_the_client_is_asked_to_run_and_to_undo_a_command(client: Client) -> None:
    with contextlib.closing(client):
        number = client.driver.begin("stop", "m1", 5.0)
        assert client.received() == [RunExternalCommand(number, "stop", "m1", 5.0)]
        assert not client.driver.is_done(number)
        client.send(ExternalCommandDone(number))
        assert client.driver.is_done(number)
        client.driver.end(number)
        assert client.received() == [UndoExternalCommand(number)]


def test_a_failure_of_the_client_is_one_of_the_driver(client: Client) -> None:
    with contextlib.closing(client):
        number = client.driver.begin("cut", "m1")
        client.send(ExternalCommandDone(number, "m1 may not be broken"))
        with pytest.raises(HarnessError, match="m1 may not be broken"):
            client.driver.is_done(number)


def test_an_order_that_comes_meanwhile_is_not_lost(client: Client) -> None:
    with contextlib.closing(client):
        number = client.driver.begin("cut", "m1")
        client.send(AskAble("a:b"))
        client.send(ExternalCommandDone(number))
        assert client.driver.is_done(number)
        assert client.driver.next_order() == AskAble("a:b")


def test_a_client_that_hangs_up_ends_the_driver(client: Client) -> None:
    number = client.driver.begin("cut", "m1")
    client.line.close()
    assert not client.driver.is_done(number)
    assert client.driver.next_order() is None
    client.close()


def test_nothing_waits_for_a_command_that_takes_its_time() -> None:
    release = threading.Event()

    def slow(name: str, machine: str) -> Callable[[], None]:
        release.wait(30)
        return lambda: None

    commands = LocalCommands(slow)
    number = commands.begin("cut", "m1")
    assert not commands.is_done(number)
    release.set()
    wait_until(lambda: commands.is_done(number), "the command")
    commands.settle()
