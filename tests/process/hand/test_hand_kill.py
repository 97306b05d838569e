"""Tests of a hand that kills processes, also pid 1, and of its rights on processes of other users."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.hand.client import AS_USER, UID, hand, no_namespaces
from support.hand.targets import pid_one, target
from support.waiting import stays, wait_until

from chaoskit.process.linux import children, state
from chaoskit.substrate.core.launched_ranks import VARIABLES

needs_namespaces = pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
SECRET = "not-to-be-sent"


def test_a_process_is_killed_by_a_signal() -> None:
    with hand("processes") as client, target(threads=2) as process:
        identity = client.identity(process.pid)
        answer = client.do("kill", **identity)
        assert (answer["by"], answer["gone"]) == ("signal", True)
        assert client.do("look", **identity)["gone"] is True
        assert process.process.wait(20) == -signal.SIGKILL


def test_a_stopped_process_is_killed_by_a_signal() -> None:
    with hand("processes") as client, target(threads=2) as process:
        identity = client.identity(process.pid)
        client.do("stop", **identity, lasts_s=600)
        assert client.do("kill", **identity)["gone"] is True
        assert process.process.wait(20) == -signal.SIGKILL
        assert client.event("ended")["why"] == "gone"


@needs_namespaces
@pytest.mark.parametrize("is_stopped", [False, True])
def test_pid_one_is_killed_by_its_tracer_without_a_capability(is_stopped: bool) -> None:
    """The hand has the target's user. It ends with the pid namespace."""
    with (
        pid_one(*AS_USER) as (process, inside),
        hand("processes", prefix=(*inside, *AS_USER)) as client,
    ):
        identity = client.identity(1)
        if is_stopped:
            client.do("stop", **identity, lasts_s=600)
        client.send(b'{"number": 99, "do": "kill", "pid": 1, "ticks": %d}\n' % identity["ticks"])
        killing = client.event("killing")
        assert (killing["request"], killing["by"]) == (99, "tracer")
        wait_until(lambda: state(process.pid) in (None, "Z"), "the end of pid 1")
        client.wait()


@needs_namespaces
def test_a_kill_of_a_former_pid_one_leaves_the_stop_of_the_present_one() -> None:
    with pid_one(*AS_USER) as (_, inside), hand("processes", prefix=(*inside, *AS_USER)) as client:
        identity = client.identity(1)
        number = client.do("stop", **identity, lasts_s=600)["effect"]
        line = client.ask("kill", pid=1, ticks=identity["ticks"] + 1)
        assert line["error"]["field"] == "ticks"
        assert client.do("counters", effect=number)["held"] is True


@needs_namespaces
def test_a_signal_does_not_kill_pid_one_from_inside() -> None:
    """The reason for the tracer: the kernel ignores the signal."""
    with pid_one(*AS_USER) as (process, inside):
        command = [*inside, *AS_USER, "kill", "-KILL", "1"]
        assert os.spawnvp(os.P_WAIT, command[0], command) == 0
        process.wait_for_tick()
        process.wait_for_tick()


@needs_namespaces
def test_pid_one_is_stopped_without_a_capability_and_goes_on_when_the_hand_is_killed() -> None:
    with (
        pid_one(*AS_USER) as (process, inside),
        hand("processes", prefix=(*inside, *AS_USER)) as client,
    ):
        answer = client.do("stop", **client.identity(1), lasts_s=600)
        (hand_pid,) = children(client.process.pid)
        assert answer["held"] is True
        count = len(process.times_s())
        stays(lambda: len(process.times_s()) == count, "no tick", for_s=0.3)
        os.kill(hand_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        assert process.wait_for_tick() - killed_s < 2.0


@needs_namespaces
@pytest.mark.parametrize("do", ["kill", "stop", "throttle"])
def test_a_hand_of_another_user_says_which_user_it_would_need(do: str) -> None:
    """The process goes on, and looks at it show so."""
    fields = {"kill": {}, "stop": {"lasts_s": 9}, "throttle": {"lasts_s": 9, "share": 0.5}}[do]
    other = tuple(option.replace(str(UID), "1001") for option in AS_USER)
    with (
        pid_one(*AS_USER) as (process, inside),
        hand("processes", prefix=(*inside, *other)) as client,
    ):
        record = client.do("hello")["processes"][0]
        assert record["environ"] == "denied"
        assert record["needs"] == {"uid": UID, "gid": UID}
        identity = client.identity(1)
        unable = client.ask(do, **identity, **fields)["unable"]
        assert f"runAsUser: {UID} and runAsGroup: {UID}" in unable["remedy"]
        before = client.do("look", **identity)
        process.wait_for_tick()
        after = client.do("look", **identity)
        assert after["gone"] is False
        assert after["switches"] > before["switches"]


@needs_namespaces
def test_root_without_capabilities_says_which_ones_it_lacks() -> None:
    """The target has those of root."""
    bare = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    with pid_one() as (process, inside), hand("processes", prefix=(*inside, *bare)) as client:
        unable = client.ask("stop", **client.identity(1), lasts_s=9)["unable"]
        assert "SYS_ADMIN" in unable["reason"]
        assert "SYS_PTRACE" in unable["remedy"]
        process.wait_for_tick()


@needs_namespaces
def test_a_signal_to_a_process_of_another_user_is_refused_with_the_user() -> None:
    with target() as process, hand("processes", prefix=AS_USER) as client:
        unable = client.ask("kill", **client.identity(process.pid))["unable"]
        assert "runAsUser: 0" in unable["remedy"]
        process.wait_for_tick()


def test_only_variables_that_carry_a_rank_are_sent() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "AWS_SECRET": SECRET, "LOCAL_RANK": SECRET}
    with target(environment=variables) as process, hand("processes") as client:
        records = {record["pid"]: record for record in client.do("hello")["processes"]}
        record = records[process.pid]
        assert record["variables"] == {"RANK": "3", "WORLD_SIZE": "8"}
        assert record["environ"] == "read"
        assert SECRET not in str(client.lines)


def test_each_variable_of_a_launched_rank_is_sent() -> None:
    computed = ("NODE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NNODES")
    variables = {name: str(number) for number, name in enumerate((*VARIABLES, *computed))}
    with target(environment=variables) as process, hand("processes") as client:
        records = {record["pid"]: record for record in client.do("list")["processes"]}
        assert records[process.pid]["variables"] == variables


def test_a_list_shows_processes_that_were_started_later() -> None:
    with hand("processes") as client:
        before = {record["pid"] for record in client.do("list")["processes"]}
        with target() as process:
            assert process.pid not in before
            wait_until(
                lambda: process.pid in {r["pid"] for r in client.do("list")["processes"]},
                "the process in the list",
            )
