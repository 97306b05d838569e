"""Tests of ``chaoskit node`` as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit.cli.app import run

TOKEN = "a-token-that-both-sides-know"


class Command:
    """A runner of the command line in this process, which saves the start of a Python; it checks
    the exit code.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int) -> str:
        assert run([*map(str, arguments)]) == code
        printed = self._capsys.readouterr()
        return printed.out or printed.err

    def run_json(self, *arguments: object, code: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code))
        return content


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CHAOSKIT_HEALTH_TOKEN", raising=False)
    return Command(capsys)


FIT = ("--only", "compute", "--only", "clock")  # checks that any machine passes
UNFIT = (*FIT, "--only", "disk", "--limit", "disk_free_bytes_min=1e18")


def test_a_fit_machine(command: Command) -> None:
    report = command.run_json("node", "check", *FIT, code=0)
    assert report["ok"]
    assert {finding["what"].partition(".")[0] for finding in report["findings"]} == {
        "clock",
        "compute",
    }
    assert "compute.integers" in command.run("node", "check", *FIT, code=0)


def test_everything_is_examined(command: Command, tmp_path: Path) -> None:
    """A missing GPU, driver or binding of NVML is reported, and is no error."""
    generous = ("--limit", "disk_free_bytes_min=1", "--limit", "memory_available_bytes_min=1")
    findings = command.run_json("node", "check", "--directory", tmp_path, *generous, code=0)[
        "findings"
    ]
    assert {
        "gpu.count",
        "clock.step_ms",
        "disk.intact",
        "memory.available_bytes",
        "compute.floats",
    } <= {finding["what"] for finding in findings}


def test_an_unfit_machine_is_refused_with_the_reason(command: Command) -> None:
    report = command.run_json("node", "check", *UNFIT, code=1)
    assert (report["ok"], report["standing"]) == (False, "refused")
    assert len(report["reasons"]) == 1
    assert report["reasons"][0].startswith("disk.free_bytes=")
    text = command.run("node", "check", *UNFIT, code=1)
    assert "remove files that are not needed" in text
    assert "refused" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "soul"), "gpu, clock, disk"),
        (("--node", "../node1"), "lower-case letters"),
        (("--limit", "disk=1"), "NAME=VALUE"),
        (("--against", "node1"), "HOST:PORT"),
        (("--against", "node1:99999"), "HOST:PORT"),
        (("--against", "node1:7000"), "CHAOSKIT_HEALTH_TOKEN"),
    ],
)
def test_bad_input_is_refused(command: Command, arguments: tuple[str, ...], says: str) -> None:
    assert says in command.run("node", "check", *arguments, code=2)


def test_the_list_of_nodes_that_are_kept_out(command: Command) -> None:
    assert command.run("node", "list", code=0) == "no cordoned nodes\n"
    command.run(
        "node", "cordon", "node3", "--reason", "falls off the bus", "--evidence", "XID 79", code=0
    )
    (cordon,) = command.run_json("node", "list", code=0)["entries"]
    assert (cordon["node"], cordon["reason"], cordon["evidence"]) == (
        "node3",
        "falls off the bus",
        ["XID 79"],
    )
    assert "XID 79" in command.run("node", "list", code=0)
    assert "node3" in command.run("node", "uncordon", "node4", "--reason", "no", code=2)
    assert "must pass its check" in command.run(
        "node", "uncordon", "node3", "--reason", "GPU replaced", code=0
    )


def test_a_released_node_proves_itself_by_passing_whole(command: Command, tmp_path: Path) -> None:
    examine = (
        "node",
        "check",
        "--node",
        "node3",
        "--directory",
        tmp_path,
        "--limit",
        "disk_free_bytes_min=1",
    )
    examine = (*examine, "--limit", "memory_available_bytes_min=1")
    command.run("node", "cordon", "node3", "--reason", "hot", code=0)
    kept_out = command.run_json(*examine, code=1)
    assert (kept_out["ok"], kept_out["quarantined"], kept_out["proved"]) == (True, "hot", False)
    assert "cordoned since" in command.run(*examine, code=1)
    command.run("node", "uncordon", "node3", "--reason", "fan replaced", code=0)
    assert not command.run_json(*examine, *FIT, code=0)["proved"], "a part is not the whole"
    assert not command.run_json(*examine, *UNFIT[4:], code=1)["proved"]
    assert command.run_json("node", "list", code=0)["entries"]
    assert command.run_json(*examine, code=0)["proved"]
    assert command.run_json("node", "list", code=0)["entries"] == []


def test_two_machines_test_the_network_between_them(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving machine is a process as a user starts it, and ends with Ctrl-C."""
    serve = [sys.executable, "-m", "chaoskit", "node", "serve-check"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            token = server.stdout.readline().strip().removeprefix("CHAOSKIT_HEALTH_TOKEN=")
            address = server.stdout.readline().strip().removeprefix("listening on ")
            generous = ("--limit", "pair_throughput_min_mb_s=0", "--limit", "pair_rtt_max_ms=10000")
            generous = (*FIT, "--against", address, *generous)
            monkeypatch.setenv("CHAOSKIT_HEALTH_TOKEN", token)
            findings = {
                finding["what"]: finding
                for finding in command.run_json("node", "check", *generous, code=0)["findings"]
            }
            assert findings["pair.intact"]["value"] == "yes"
            assert findings["pair.rtt_ms"]["value"] > 0
            monkeypatch.setenv("CHAOSKIT_HEALTH_TOKEN", TOKEN)
            refused = command.run_json("node", "check", *generous, code=1)
            assert [reason.partition("=")[0] for reason in refused["reasons"]] == ["pair.reached"]
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 130
