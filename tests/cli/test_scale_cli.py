"""A job in training is resized by command, HTTP, file and signal, with real launches, nodes and
workers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli.test_cli import Workplace
from support.waiting import wait_until

from chaoskit.cli.training.launch import parse_elastic
from chaoskit.elastic.client import DOOR, Door, RunClient, newest_live_run, open_door
from chaoskit.errors import BadInput
from chaoskit.journal import Record, read_journals
from chaoskit.process.linux import descendants, process_name
from chaoskit.vocabulary import Event

LIMIT_S = 300.0


class Launch:
    """A job of two nodes that trains until it is ended."""

    def __init__(self, workplace: Workplace) -> None:
        self.directory = workplace.directory / "run"
        self._workplace = workplace
        arguments = [
            "launch",
            "train.py",
            "--nodes",
            "2",
            "--spares",
            "0",
            "--elastic",
            "1..4",
            "--report",
            "run",
        ]
        settings = ["--set", "steps=100000", "--set", "pause=0.02"]
        self.log = (workplace.directory / "launch.log").open("w")
        self.process = workplace.start(*arguments, *settings, stdout=self.log, stderr=self.log)

    def begin(self) -> None:
        self.until((self.directory / DOOR).exists, "the address of the launch")
        self.run = RunClient(self.directory)
        self.until(lambda: self.run.state().step > 0, "the first step")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for an event while the launch lives; the error has the launch's log."""
        log = self._workplace.directory / "launch.log"
        try:
            wait_until(
                lambda: holds() or self.process.poll() is not None,
                what,
                limit_s=LIMIT_S,
                poll_s=0.02,
            )
        except AssertionError as error:
            error.add_note(log.read_text())
            raise
        assert self.process.poll() is None, log.read_text()

    def until_world(self, size: int) -> None:
        self.until(lambda: self.run.state().world == size, f"a world of {size}")

    def command(self, *arguments: str) -> tuple[int, Any]:
        ended = self._workplace.run(*arguments, "--run", "run", "--json")
        return ended.returncode, json.loads(ended.stdout)

    def refused(self, *arguments: str) -> tuple[str, Any]:
        """Run a command that must be refused as bad input; return the field and the value."""
        code, answer = self.command(*arguments)
        assert code == 2
        return answer["error"]["field"], answer["error"]["value"]

    def records(self, event: Event) -> list[Record]:
        return [
            record for record in read_journals(self.directory / "journal") if record.event == event
        ]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT_S)
        self.log.close()


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    (tmp_path / "cache").mkdir()
    return Workplace(tmp_path, tmp_path / "cache")


@pytest.fixture
def launch(workplace: Workplace) -> Iterator[Launch]:
    launched = Launch(workplace)
    try:
        launched.begin()
        yield launched
    finally:
        launched.end()


@pytest.mark.costly
def test_every_way_to_ask(launch: Launch) -> None:
    """All ways are used on one launch: missing nodes are started, and no worker is given up."""
    code, answer = launch.command("scale", "3")
    assert (code, answer["done"], answer["state"]["world"]) == (0, True, 3)

    code, answer = launch.command("scale", "9")
    assert (code, answer["accepted"]) == (1, False)
    assert "no allowed size: use 1, 2, 3, 4" in answer["reason"]
    code, answer = launch.command("node", "drain", "node9", "--grace-s", "5")
    assert (code, answer["reason"]) == (1, "there is no 'node9': the nodes are node0, node1, node2")
    assert launch.refused("node", "drain", "node0", "--grace-s", "-1") == ("grace_s", -1.0)

    assert launch.run.scale(2).accepted
    launch.until_world(2)
    launch.until(lambda: bool(launch.records(Event.LEFT)), "the end of the rank that leaves")

    lent = launch.run.lend(2, "urgent", grace_s=30.0)  # one of the two lent nodes is idle
    assert (lent.accepted, len(lent.nodes)) == (True, 2)
    launch.until_world(1)
    assert launch.run.return_nodes("urgent").accepted
    launch.until_world(2)

    staying = launch.run.state().nodes[0]
    assert launch.command("node", "drain", staying, "--grace-s", "5")[0] == 0
    launch.until(
        lambda: staying not in launch.run.state().nodes, "the end of the node that got a notice"
    )
    assert not launch.records(Event.DETECTED)
    assert launch.records(Event.LEFT)


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("SIGTERM to the agent of a node: it is to go")
def test_a_node_that_is_told_to_end_leaves_first(launch: Launch) -> None:
    """SIGTERM goes to the agent, as from Kubernetes: the agent exits with status 0 once its rank
    has left.
    """
    agent = agent_of(launch, "node1")
    os.kill(agent, signal.SIGTERM)
    launch.until(lambda: not Path(f"/proc/{agent}").exists(), "the end of the agent")
    launch.until_world(1)
    assert [record.source for record in launch.records(Event.LEFT)] == ["node1.0"]
    assert not launch.records(Event.DETECTED)


def agent_of(launch: Launch, node: str) -> int:
    (agent,) = [pid for pid in descendants(launch.process.pid) if process_name(pid) == f"ck-{node}"]
    return agent


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether that process has a handler for the signal; the agent removes its handler after
    the first one.
    """
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> number - 1 & 1)


@pytest.mark.costly
def test_a_notice_is_taken_back(launch: Launch) -> None:
    """The node stays, whether the notice came by command or by signal."""
    assert launch.command("node", "drain", "node0", "--grace-s", "60")[0] == 0
    launch.until_world(1)
    agent = agent_of(launch, "node1")
    os.kill(
        agent, signal.SIGTERM
    )  # no other node is left: it stays as long as it can, and asks again and again
    launch.until(lambda: not catches(agent, signal.SIGTERM), "the first signal to be taken")
    assert launch.command("node", "drain", "node1", "--cancel")[0] == 0
    assert launch.command("node", "drain", "node0", "--cancel")[0] == 0
    launch.until_world(2)
    assert set(launch.run.state().nodes) == {"node0", "node1"}
    os.kill(agent, signal.SIGTERM)  # counts as the first one
    launch.until_world(1)
    launch.until(lambda: not Path(f"/proc/{agent}").exists(), "the end of the agent")
    assert [record.source for record in launch.records(Event.LEFT)] == ["node0.0", "node1.0"]
    assert not launch.records(Event.DETECTED)


@pytest.mark.parametrize("arguments", [(), ("--grace-s", "5", "--cancel")], ids=["neither", "both"])
def test_a_notice_says_when_or_that_it_is_taken_back(
    workplace: Workplace, arguments: tuple[str, ...]
) -> None:
    """A notice without a time, or with a time and a cancellation, is bad input."""
    ended = workplace.run("node", "drain", "node0", *arguments)
    assert ended.returncode == 2
    assert "--cancel" in ended.stderr


@pytest.mark.costly
def test_a_stranger_learns_nothing(launch: Launch) -> None:
    """A request without the token is refused, and the file that holds it is readable by its owner
    only.
    """
    door = json.loads((launch.directory / DOOR).read_text())
    assert stat.S_IMODE((launch.directory / DOOR).stat().st_mode) == 0o600
    for token in ("", "Bearer ", f"Bearer {door['token'][:-1]}"):
        for path, data in (("world", None), ("scale", b'{"size": 1}')):
            request = urllib.request.Request(
                f"{door['url']}/{path}", data=data, headers={"Authorization": token}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=LIMIT_S)
            assert refused.value.code == 401
    request = urllib.request.Request(
        f"{door['url']}/scale",
        data=b'{"size": "many"}',
        headers={"Authorization": f"Bearer {door['token']}"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    assert (refused.value.code, "send JSON with size (int)" in refused.value.read().decode()) == (
        400,
        True,
    )
    assert launch.run.state().world == 2
    assert not launch.records(Event.ASKED)


@pytest.mark.costly
def test_without_a_policy_a_request_is_refused(workplace: Workplace) -> None:
    """A job without an elastic policy keeps its size, and its address is gone when it has ended."""
    arguments = [
        "launch",
        "train.py",
        "--nodes",
        "1",
        "--spares",
        "0",
        "--report",
        "run",
        "--set",
        "steps=100000",
    ]
    process = workplace.start(
        *arguments, "--set", "pause=0.02", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        door = workplace.directory / "run" / DOOR
        wait_until(
            lambda: door.exists() or process.poll() is not None,
            "the address of the launch",
            limit_s=LIMIT_S,
        )
        reply = RunClient(workplace.directory / "run").scale(2)
        assert not reply.accepted
        assert "no elastic policy" in reply.reason
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    assert not (workplace.directory / "run" / DOOR).exists(), "the door is closed behind the run"


def test_a_run_that_is_over_or_none(tmp_path: Path) -> None:
    """A directory without a live run is bad input."""
    with pytest.raises(BadInput, match="that is not over"):
        RunClient(tmp_path)
    with pytest.raises(BadInput, match="no run listens there"):
        newest_live_run(tmp_path)
    (tmp_path / DOOR).write_text("{")
    with pytest.raises(BadInput, match="it is damaged"):
        RunClient(tmp_path)


def test_the_newest_live_run_is_one_whose_launcher_lives(tmp_path: Path) -> None:
    """A launcher that was killed leaves its address behind."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for name, pid in (("001-lives", os.getpid()), ("002-killed", gone.pid)):
        (tmp_path / name).mkdir()
        open_door(tmp_path / name, Door("http://127.0.0.1:1", "token", pid))
    (tmp_path / "003-damaged").mkdir()
    (tmp_path / "003-damaged" / DOOR).write_text("{")
    assert newest_live_run(tmp_path) == tmp_path / "001-lives"


def test_the_policy_on_the_command_line(tmp_path: Path) -> None:
    """A policy is given as a range or as a file."""
    policy = parse_elastic("2..8")
    assert policy is not None
    assert (policy.sizes[0], policy.sizes[-1], policy.scaling_timeout_s) == (2, 8, 0.0)
    file = tmp_path / "policy.yaml"
    file.write_text(
        "elasticPolicy: {minReplicas: 1, maxReplicas: 4, replicaDiscreteValues: [1, 2, 4]}"
    )
    policy = parse_elastic(str(file))
    assert policy is not None
    assert policy.sizes == (1, 2, 4)
    assert parse_elastic("") is None
    for wrong in ("8..2", "two..8", str(tmp_path / "none.yaml")):
        with pytest.raises(BadInput):
            parse_elastic(wrong)
    assert msgspec.json.encode(policy)
