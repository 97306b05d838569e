"""A fault is never confirmed if its effect is switched off below its backend, or its evidence
cannot be read.

The code of faults, backends and evidence is untouched: the tests replace the kernel's part, or that
of the worker.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaoskit.config import DETECTION
from chaoskit.experiment.harness import Harness
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.core import commands
from chaoskit.substrate.limits import capabilities, cgroup
from chaoskit.vocabulary import Verdict
from faults import (
    Bandwidth,
    BitFlip,
    Cut,
    Delay,
    DiskError,
    DiskFull,
    Exit,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    KillAgent,
    KillCoordinator,
    KillNode,
    LimitCpu,
    LimitMemory,
    LinkDown,
    Loss,
    NaN,
    Preempt,
    Reset,
    SlowDisk,
)

JOBS = Path(__file__).parents[2] / "jobs"
TROUBLED = f"{JOBS / 'failing' / 'troubled.py'}:plain"
AT = 5
PLAN: dict[str, Any] = {
    "nodes": 3,
    "steps": 60,
    "options": {"step_s": 0.02},
    "deadline_s": 60.0,
    "twin": False,
}

Break = Callable[[pytest.MonkeyPatch, Path], None]


def _name(parameter: object) -> str:
    return getattr(parameter, "__name__", str(parameter))


def assert_unknown(outcome: Outcome) -> None:
    """Assert that no fault is confirmed and the verdict is unknown."""
    assert [fault.state for fault in outcome.faults] == ["not observed"], outcome.reasons
    assert outcome.verdict == Verdict.UNKNOWN, outcome.reasons


# -- in the harness --------------------------------------------------------------------------------


def send_no_signal(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)


def write_no_control_file(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make writes to control groups have no effect, except that processes enter and leave them."""
    write = Path.write_text

    def write_text(path: Path, text: str, *how: Any, **named: Any) -> int:
        is_control = path.is_relative_to("/sys/fs/cgroup") and path.name not in (
            "cgroup.procs",
            "tasks",
        )
        return len(text) if is_control else write(path, text, *how, **named)

    monkeypatch.setattr(Path, "write_text", write_text)


def read_no_count(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make the kernel's counts of control groups unreadable."""
    read = Path.read_text

    def read_text(path: Path, *how: Any, **named: Any) -> str:
        if path.name in (
            "cpu.stat",
            "memory.oom_control",
            "memory.events",
            "freezer.state",
            "cgroup.events",
        ):
            raise PermissionError(13, "blinded")
        return read(path, *how, **named)

    monkeypatch.setattr(Path, "read_text", read_text)


SIGNALS: list[Fault] = [
    Kill(rank=1, at_step=AT),
    Hang(rank=1, at_step=AT, how="stop"),
    KillAgent(rank=1, at_step=AT),
    KillNode(rank=1, at_step=AT),
    Preempt(rank=1, at_step=AT, grace_s=0.1),
    FreezeNode(rank=1, at_step=AT, thaw_after_s=0.2),
    KillCoordinator(at_step=AT),
]
GROUPS: list[Fault] = [
    FreezeNode(rank=1, at_step=AT, how="cgroup", thaw_after_s=0.2),
    LimitCpu(rank=1, at_step=AT, cores=0.1),
    LimitMemory(rank=1, at_step=AT),
]


@pytest.mark.parametrize(
    ("fault", "switch_off"),
    [
        *((fault, send_no_signal) for fault in SIGNALS),
        *((fault, write_no_control_file) for fault in GROUPS),
        *((fault, read_no_count) for fault in GROUPS),
    ],
    ids=_name,
)
def test_what_the_kernel_does_not_do_is_not_confirmed(
    chaos: Chaos, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, switch_off: Break
) -> None:
    """Signals that are not sent, control groups that limit nothing, and unreadable counts confirm
    no fault.
    """
    if fault in GROUPS and (
        reason := next(filter(None, map(cgroup.unavailable, ("cpu", "memory", "freezer"))), "")
    ):
        pytest.skip(reason)
    with monkeypatch.context() as patched:
        switch_off(patched, tmp_path)
        outcome = chaos.run(TROUBLED, faults=[fault], check=False, **PLAN)
    assert_unknown(outcome)


# -- in the processes that change networks and disks -----------------------------------------------


def command_before(
    monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, script: str
) -> None:
    """Make started processes find a script before the command ``name``; ``{real}`` in it is the
    original command.
    """
    bin_directory = directory / "bin"
    bin_directory.mkdir(exist_ok=True)
    path = bin_directory / name
    path.write_text("#!/bin/sh\n" + script.replace("{real}", str(commands.find(name))))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_directory), prepend=":")


def module_before(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """Make every started Python process run ``code`` first."""
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")


def let_all_packets_pass(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Turn dropping rules into counting rules that let packets pass."""
    accepted = "s/counter drop/counter accept/; s/counter reject with tcp reset/counter accept/"
    script = f'[ "$1" = -f ] || exec {{real}} "$@"\nsed "{accepted}" | {{real}} -f -\n'
    command_before(monkeypatch, directory, "nft", script)


def list_no_counters(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make the counters of the rules unreadable; the rules drop packets as they should."""
    script = '[ "$1" = --json ] || exec {real} "$@"\necho \'{"nftables": []}\'\n'
    command_before(monkeypatch, directory, "nft", script)


def queue_no_packet(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    command_before(monkeypatch, directory, "iptables", "exit 0\n")


def change_no_link(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Prevent queueing disciplines from being created, and links from being taken down."""
    code = """
try:
    from pyroute2 import IPRoute
except ImportError:
    pass
else:
    find = IPRoute.__getattribute__

    def find_harmless(links, name):
        if name == "tc":
            return lambda *command, **options: ()
        if name != "link":
            return find(links, name)
        link = links.__getattr__("link")
        return lambda *command, **options: () if options.get("state") == "down" else link(*command, **options)

    IPRoute.__getattribute__ = find_harmless
"""
    module_before(monkeypatch, directory, code)


def rule_nothing(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make the file system pass on every operation."""
    code = """
from chaoskit.substrate.core import disk
disk.Ailments.rule = lambda self, operation, size_bytes=0: disk.Ruling()
"""
    module_before(monkeypatch, directory, code)


NETWORK: list[tuple[Fault, Break]] = [
    (Cut(rank=1, at_step=AT, heal_after_s=0.3), let_all_packets_pass),
    (Reset(rank=1, at_step=AT, heal_after_s=0.3), let_all_packets_pass),
    (Loss(rank=1, at_step=AT, share=0.3), let_all_packets_pass),
    (Loss(rank=1, at_step=AT, share=0.05), list_no_counters),
    (Delay(rank=1, at_step=AT, delay_ms=5.0), queue_no_packet),
    (Bandwidth(rank=1, at_step=AT, bits_per_s=1e6), change_no_link),
    (LinkDown(rank=1, at_step=AT, heal_after_s=0.3), change_no_link),
]
DISKS: list[tuple[Fault, Break]] = [
    (SlowDisk(rank=1, at_step=AT, delay_ms=5.0), rule_nothing),
    (DiskFull(rank=1, at_step=AT), rule_nothing),
    (DiskError(rank=1, at_step=AT), rule_nothing),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function that runs a job on a substrate of its own, after ``switch_off``."""

    def run_without(
        substrate: str, job: str, fault: Fault, switch_off: Break, **plan: Any
    ) -> Outcome:
        switch_off(monkeypatch, tmp_path)
        with Harness(substrate, tmp_path / "runs") as harness:
            return harness.run(job, faults=[fault], **PLAN | plan, **DETECTION["relaxed"])

    return run_without


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "switch_off"), NETWORK, ids=_name)
def test_a_network_that_works_is_not_confirmed_to_be_broken(
    run: Callable[..., Outcome], fault: Fault, switch_off: Break
) -> None:
    """Rules that drop nothing, idle queues, links that stay up, and unreadable counters confirm no
    fault.
    """
    if reason := fault.unavailable():
        pytest.skip(reason)
    if switch_off is queue_no_packet and "netem" in capabilities.disciplines():
        pytest.skip("this kernel has netem: no queue of ours holds packets up")
    assert_unknown(run("netns", TROUBLED, fault, switch_off))


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "switch_off"), DISKS, ids=_name)
def test_a_disk_that_works_is_not_confirmed_to_be_broken(
    run: Callable[..., Outcome], fault: Fault, switch_off: Break
) -> None:
    """A file system that passes on every operation confirms no fault."""
    if reason := fault.unavailable():
        pytest.skip(reason)
    assert_unknown(
        run(
            "local",
            f"{JOBS / 'failing' / 'saves.py'}:bears_errors",
            fault,
            switch_off,
            nodes=2,
            options={},
        )
    )


# -- in the worker ---------------------------------------------------------------------------------

#: A job that trains as TROUBLED does, with a call that does nothing in its workers.
WITHOUT = """
import os, sys
import torch
sys.path.insert(0, {folder!r})
import troubled

put = torch.Tensor.__setitem__

def finite_only(tensor, index, value):
    if not (isinstance(value, float) and value != value):
        put(tensor, index, value)

def train(trainer, *, steps, step_s=0.0):
    {statement}
    troubled.plain(trainer, steps=steps, step_s=step_s)
"""
WORKER: list[tuple[Fault, str]] = [
    (Exit(rank=1, at_step=AT), "os._exit = lambda status: None"),
    (
        NaN(rank=1, at_step=AT, where="weight", parameter="0.weight"),
        "torch.Tensor.__setitem__ = finite_only",
    ),
    (
        BitFlip(rank=1, at_step=AT, where="weight", parameter="0.weight", bit=3),
        "torch.Tensor.fill_ = lambda tensor, value: tensor",
    ),
]


@pytest.mark.parametrize(("fault", "statement"), WORKER, ids=_name)
def test_what_a_worker_does_not_do_is_not_confirmed(
    chaos: Chaos, tmp_path: Path, fault: Fault, statement: str
) -> None:
    """An exit that does not end, or a number that is not written, confirms no fault."""
    job = tmp_path / "without.py"
    job.write_text(WITHOUT.format(folder=str(JOBS / "failing"), statement=statement))
    assert_unknown(chaos.run(str(job), faults=[fault], check=False, **PLAN))
