"""A job that trains is told another size: by command, HTTP, file and signal. Real launches, nodes and workers."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_cli import Workplace

from chaoskit.elastic.client import DOOR, Run, newest_run
from chaoskit.errors import BadInput
from chaoskit.faces.launch import parse_elastic
from chaoskit.journal import Record, read_journals
from chaoskit.osprocess import descendants, process_name
from chaoskit.vocabulary import Event

LIMIT_S = 90.0


class Launch:
    """A job of two nodes that trains until it is told to end."""

    def __init__(self, workplace: Workplace) -> None:
        self.directory = workplace.directory / "run"
        self._workplace = workplace
        arguments = ["launch", "train.py", "--nodes", "2", "--spares", "0", "--elastic", "1..4", "--report", "run"]
        settings = ["--set", "steps=100000", "--set", "pause=0.02"]
        self.log = (workplace.directory / "launch.log").open("w")
        self.process = workplace.start(*arguments, *settings, stdout=self.log, stderr=self.log)
        self.until((self.directory / DOOR).exists)
        self.run = Run(self.directory)
        self.until(lambda: self.run.state().step > 0)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline_s, (self._workplace.directory / "launch.log").read_text()
            assert self.process.poll() is None, (self._workplace.directory / "launch.log").read_text()
            time.sleep(0.02)

    def until_world(self, size: int) -> None:
        self.until(lambda: self.run.state().world == size)

    def command(self, *arguments: str) -> tuple[int, Any]:
        ended = self._workplace.run(*arguments, "--run", "run", "--json")
        return ended.returncode, json.loads(ended.stdout)

    def refused(self, *arguments: str) -> tuple[str, Any]:
        """Field and value of what is bad input."""
        code, said = self.command(*arguments)
        assert code == 2
        return said["error"]["field"], said["error"]["value"]

    def records(self, event: Event) -> list[Record]:
        return [record for record in read_journals(self.directory / "journal") if record.event == event]

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
    yield launched
    launched.end()


def test_every_way_to_ask(launch: Launch) -> None:
    """One launch for all of them: nodes that are missing are started, and nobody is given up."""
    code, said = launch.command("scale", "3")
    assert (code, said["done"], said["state"]["world"]) == (0, True, 3)

    code, said = launch.command("scale", "9")
    assert (code, said["accepted"]) == (1, False)
    assert "no allowed size: use 1, 2, 3, 4" in said["reason"]
    code, said = launch.command("notice", "node9", "--grace-s", "5")
    assert (code, said["reason"]) == (1, "there is no 'node9': the nodes are node0, node1, node2")
    assert launch.refused("notice", "node0", "--grace-s", "-1") == ("grace_s", -1.0)
    assert launch.refused("lend", "0", "--job", "urgent") == ("nodes", 0)
    assert launch.refused("lend", "1", "--job", "") == ("job", "")
    code, said = launch.command("give-back", "--job", "nobody")
    assert (code, said["reason"]) == (1, "'nobody' has no nodes of this run")

    (launch.directory / "scale").write_text("2\n")
    launch.until_world(2)

    os.kill(launch.process.pid, signal.SIGUSR1)
    launch.until_world(3)
    os.kill(launch.process.pid, signal.SIGUSR2)
    launch.until_world(2)

    code, said = launch.command("lend", "2", "--job", "urgent")  # one of them idles
    assert (code, len(said["nodes"])) == (0, 2)
    launch.until_world(1)
    assert launch.command("give-back", "--job", "urgent")[0] == 0
    launch.until_world(2)

    staying = launch.run.state().nodes[0]
    assert launch.command("notice", staying, "--grace-s", "5")[0] == 0
    launch.until(lambda: staying not in launch.run.state().nodes)
    assert not launch.records(Event.DETECTED)
    assert launch.records(Event.LEFT)


def test_a_node_that_is_told_to_end_leaves_first(launch: Launch) -> None:
    """SIGTERM to its agent, as Kubernetes sends it: the agent ends by itself, with status 0, when its rank is out."""
    agent = agent_of(launch, "node1")
    os.kill(agent, signal.SIGTERM)
    launch.until(lambda: not Path(f"/proc/{agent}").exists())
    launch.until_world(1)
    assert [record.source for record in launch.records(Event.LEFT)] == ["node1.0"]
    assert not launch.records(Event.DETECTED)


def agent_of(launch: Launch, node: str) -> int:
    (agent,) = [pid for pid in descendants(launch.process.pid) if process_name(pid) == f"ck-{node}"]
    return agent


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process has a handler for the signal; the agent takes its own away when it has had the first."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> number - 1 & 1)


def test_a_notice_is_taken_back_by_command_and_by_signal(launch: Launch) -> None:
    assert launch.command("notice", "node0", "--grace-s", "60")[0] == 0
    launch.until_world(1)
    agent = agent_of(launch, "node1")
    os.kill(agent, signal.SIGTERM)  # nobody else is left: it stays as long as it can, and asks again and again
    launch.until(lambda: not catches(agent, signal.SIGTERM))  # of two signals the one with the lower number comes first
    os.kill(agent, signal.SIGUSR1)
    assert launch.command("notice", "node0", "--cancel")[0] == 0
    launch.until_world(2)
    assert set(launch.run.state().nodes) == {"node0", "node1"}
    os.kill(agent, signal.SIGTERM)  # counts as the first one
    launch.until_world(1)
    launch.until(lambda: not Path(f"/proc/{agent}").exists())
    assert [record.source for record in launch.records(Event.LEFT)] == ["node0.0", "node1.0"]
    assert not launch.records(Event.DETECTED)


@pytest.mark.parametrize("arguments", [(), ("--grace-s", "5", "--cancel")], ids=["neither", "both"])
def test_a_notice_says_when_or_that_it_is_taken_back(workplace: Workplace, arguments: tuple[str, ...]) -> None:
    ended = workplace.run("notice", "node0", *arguments)
    assert ended.returncode == 2
    assert "--cancel" in ended.stderr


def test_a_stranger_learns_nothing(launch: Launch) -> None:
    door = json.loads((launch.directory / DOOR).read_text())
    assert stat.S_IMODE((launch.directory / DOOR).stat().st_mode) == 0o600
    for token in ("", "Bearer ", f"Bearer {door['token'][:-1]}"):
        for path, data in (("world", None), ("scale", b'{"size": 1}')):
            request = urllib.request.Request(f"{door['url']}/{path}", data=data, headers={"Authorization": token})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 401
    with pytest.raises(BadInput, match=r"send JSON with size \(int\)"):
        launch.run._ask("scale", {"size": "many"})
    assert launch.run.state().world == 2
    assert not launch.records(Event.ASKED)


def test_without_a_policy_a_request_is_refused(workplace: Workplace) -> None:
    arguments = ["launch", "train.py", "--nodes", "1", "--spares", "0", "--report", "run", "--set", "steps=100000"]
    process = workplace.start(*arguments, "--set", "pause=0.02", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not (workplace.directory / "run" / DOOR).exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        reply = Run(workplace.directory / "run").scale(2)
        assert not reply.accepted
        assert "no elastic policy" in reply.reason
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    assert not (workplace.directory / "run" / DOOR).exists(), "the door is closed behind the run"


def test_a_run_that_is_over_or_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="that is not over"):
        Run(tmp_path)
    with pytest.raises(BadInput, match="no run listens there"):
        newest_run(tmp_path)
    (tmp_path / DOOR).write_text("{")
    with pytest.raises(BadInput, match="it is damaged"):
        Run(tmp_path)


def test_the_policy_on_the_command_line(tmp_path: Path) -> None:
    policy = parse_elastic("2..8")
    assert policy is not None
    assert (policy.sizes[0], policy.sizes[-1], policy.scaling_timeout_s) == (2, 8, 0.0)
    file = tmp_path / "policy.yaml"
    file.write_text("elasticPolicy: {minReplicas: 1, maxReplicas: 4, replicaDiscreteValues: [1, 2, 4]}")
    policy = parse_elastic(str(file))
    assert policy is not None
    assert policy.sizes == (1, 2, 4)
    assert parse_elastic("") is None
    for wrong in ("8..2", "two..8", str(tmp_path / "none.yaml")):
        with pytest.raises(BadInput):
            parse_elastic(wrong)
    assert msgspec.json.encode(policy)
