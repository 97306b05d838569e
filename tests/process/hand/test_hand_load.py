"""Tests of a hand that loads the cgroup of its target. Group, limit and processes are real."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from support.hand.client import HandClient, hand, no_namespaces
from support.hand.pipes import hand_on_processes
from support.hand.targets import Target, pid_one
from support.waiting import wait_until

from chaoskit.attach.hands.hand import HandUnable
from chaoskit.attach.hands.load import HandLoad
from chaoskit.hand import PROGRAM_NAME
from chaoskit.process.linux import children, start_ticks
from chaoskit.substrate.core.actions import CapCpu
from chaoskit.substrate.limits.cgroup import Cgroup, unavailable
from chaoskit.substrate.undo import UndoLog

reason = no_namespaces() or unavailable("cpu")
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)
#: The limit of the group. Other processes of a busy machine leave it so much.
LIMIT_CORES = 0.1
LONG_S = 600.0


@contextlib.contextmanager
def limited(
    program: str = "spinning", limit_cores: float | None = LIMIT_CORES
) -> Iterator[tuple[Target, Cgroup, tuple[str, ...]]]:
    """Start a process as pid 1 in a cgroup.

    Yields:
        The process, the cgroup, and a command that starts another program beside the process.
    """
    with pid_one(program=program) as (target, enter):
        group = Cgroup("cpu", target.pid, start_ticks(target.pid), UndoLog())
        group.limit_cpu(limit_cores)
        join = f'echo $$ > {group.path}/cgroup.procs && exec "$@"'
        try:
            yield target, group, ("sh", "-c", join, "sh", *enter)
        finally:
            group.remove()


@contextlib.contextmanager
def loaded(
    program: str = "spinning", limit_cores: float | None = LIMIT_CORES
) -> Iterator[tuple[HandClient, Target, Cgroup]]:
    """Start a process as pid 1, and a hand in its namespace and its cgroup."""
    with (
        limited(program, limit_cores) as (target, group, prefix),
        hand("processes", prefix=prefix) as client,
    ):
        client.do("ping")
        yield client, target, group


def others_in(group: Cgroup, target: Target) -> set[int]:
    return group.pids() - {target.pid}


def test_a_load_takes_cpu_time_and_ends() -> None:
    """The kernel counts, and the process in the group has less CPU time than before."""
    with loaded() as (client, target, group):
        before = others_in(group, target)
        load = client.do("load", cores=0.03, lasts_s=LONG_S)
        assert load["limit_cores"] == LIMIT_CORES
        assert load["periods"] == 0
        counted = wait_until(
            lambda: (
                evidence
                if (evidence := client.do("counters", effect=load["effect"]))["periods"]
                else None
            ),
            "periods of the kernel",
        )
        assert counted["cores_now"] <= 0.9 * counted["cores_before"]
        assert counted["waited_now"] > counted["waited_before"]
        assert counted["burners"] == len(others_in(group, target) - before) >= 2
        names = [process["name"] for process in client.do("list")["processes"]]
        assert names.count(PROGRAM_NAME) == 1 + counted["burners"]
        assert client.do("lift", effect=load["effect"])["periods"] >= counted["periods"]
        assert others_in(group, target) == before


def test_a_load_of_a_process_that_sleeps_is_no_evidence() -> None:
    with loaded("uninterruptible") as (client, target, _):
        load = client.do("load", cores=0.03, lasts_s=4.0)
        ended = client.event("ended", load["effect"])
        assert ended["why"] == "expired"
        assert ended["evidence"]["periods"] == 0
        assert ended["evidence"]["burners"] == 1
        target.interrupt()


def test_a_load_ends_when_the_hand_is_killed() -> None:
    with loaded() as (client, target, group):
        (own_pid,) = children(client.process.pid)
        load = client.do("load", cores=0.03, lasts_s=LONG_S)
        wait_until(lambda: client.do("counters", effect=load["effect"])["burners"] >= 2, "the load")
        os.kill(own_pid, signal.SIGKILL)
        wait_until(lambda: not others_in(group, target), "the end of the load")


@pytest.mark.parametrize(
    ("limit_cores", "cores", "part"),
    [(None, 0.03, "no CPU limit"), (LIMIT_CORES, 0.1, "limit of the container is 0.1")],
)
def test_a_load_that_would_limit_nothing_is_refused(
    limit_cores: float | None, cores: float, part: str
) -> None:
    with loaded(limit_cores=limit_cores) as (client, target, group):
        refusal = client.ask("load", cores=cores, lasts_s=LONG_S)["unable"]
        assert part in refusal["reason"]
        assert len(others_in(group, target)) == 2  # nsenter, and the hand


def test_the_backend_counts_periods_and_lifts_the_load() -> None:
    with limited() as (target, group, prefix), hand_on_processes(prefix=prefix) as (client, _):
        client.ask("ping")
        before = others_in(group, target)
        backend = HandLoad(lambda node: client)
        with pytest.raises(HandUnable, match="leave it fewer CPUs"):
            backend.apply("node", CapCpu(1.0))
        applied = backend.apply("node", CapCpu(0.03))
        assert applied.shown() == 0
        wait_until(applied.shown, "periods of the kernel")
        assert applied.lift()
        assert others_in(group, target) == before
        assert applied.shown() > 0
        assert applied.lift()


def test_the_load_of_a_hand_that_is_gone_has_ended() -> None:
    with limited() as (target, group, prefix):
        with hand_on_processes(prefix=prefix) as (client, _):
            applied = HandLoad(lambda node: client).apply("node", CapCpu(0.03))
        assert applied.lift()
        assert applied.shown() == 0
        wait_until(lambda: not others_in(group, target), "the end of the load")
