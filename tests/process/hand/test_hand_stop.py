"""Tests of a hand that stops and throttles processes. The processes are real."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.hand.client import HandClient, hand
from support.hand.targets import Target, target
from support.waiting import stays, wait_until

from chaoskit.process.linux import kill_if_same, start_ticks, state

LONG_S = 600.0


def stop(client: HandClient, process: Target, lasts_s: float = LONG_S) -> dict[str, object]:
    return client.do("stop", **client.identity(process.pid), lasts_s=lasts_s)


def test_a_stopped_process_goes_on_after_its_time_without_a_further_message() -> None:
    with hand("processes") as client, target(threads=5) as process:
        answer = stop(client, process, lasts_s=0.8)
        assert answer["held"] is True
        assert answer["threads"] == answer["stopped"] == 5
        ended = client.event("ended", answer["effect"])
        assert ended["why"] == "expired"
        evidence = ended["evidence"]
        assert evidence["held"] is True
        assert evidence["cpu_ticks_grown"] == evidence["switches_grown"] == 0
        assert evidence["lasted_s"] >= 0.8
        process.wait_for_tick()
        for label in map(str, range(5)):
            assert process.longest_gap_s(label) >= 0.8


def test_looks_at_a_stopped_process_are_equal_and_those_at_a_running_one_differ() -> None:
    with hand("processes") as client, target(threads=3) as process:
        identity = client.identity(process.pid)
        before = client.do("look", **identity)
        process.wait_for_tick()
        assert client.do("look", **identity)["switches"] > before["switches"]
        answer = stop(client, process)
        looks = [client.do("look", **identity) for _ in range(2)]
        assert looks[0]["states"] == {"t": 3}
        for name in ("switches", "cpu_ticks", "states"):
            assert looks[0][name] == looks[1][name]
        client.do("resume", effect=answer["effect"])
        process.wait_for_tick()
        assert client.do("look", **identity)["switches"] > looks[0]["switches"]


def test_a_stopped_process_goes_on_when_the_hand_is_killed() -> None:
    with hand("processes") as client, target(threads=3) as process:
        stop(client, process)
        count = len(process.times_s())
        stays(lambda: len(process.times_s()) == count, "no tick", for_s=0.3)
        killed_s = time.monotonic()
        client.process.send_signal(signal.SIGKILL)
        assert process.wait_for_tick() - killed_s < 2.0


def test_an_extended_stop_lasts_longer() -> None:
    with hand("processes") as client, target() as process:
        answer = stop(client, process, lasts_s=0.5)
        client.do("extend", effect=answer["effect"], lasts_s=1.2)
        evidence = client.event("ended", answer["effect"])["evidence"]
        assert evidence["lasted_s"] >= 1.2
        assert evidence["held"] is True


def test_threads_that_appear_during_the_stop_are_stopped() -> None:
    """Each thread of the process starts the next one, some 10,000 in a second."""
    with hand("processes") as client, target("chain", threads=3) as process:
        for _ in range(10):
            answer = stop(client, process)
            assert answer["held"] is True, answer
            assert set(answer["states"]) == {"t"}
            count = len(process.times_s())
            stays(lambda count=count: len(process.times_s()) == count, "no thread", for_s=0.05)
            assert client.do("lift", effect=answer["effect"])["held"] is True
            process.wait_for_tick()


def test_a_thread_in_an_uninterruptible_call_is_not_held_until_the_call_returns() -> None:
    with hand("processes") as client, target("uninterruptible") as process:
        wait_until(lambda: state(process.pid) == "D", "the uninterruptible call")
        answer = stop(client, process)
        assert (answer["held"], answer["stopped"], answer["states"]) == (False, 0, {"D": 1})
        process.interrupt()
        wait_until(lambda: client.do("counters", effect=answer["effect"])["held"], "the stop")
        stays(lambda: not process.times_s("spawned"), "the process does not go on", for_s=0.2)
        assert client.do("lift", effect=answer["effect"])["held"] is True
        wait_until(lambda: process.times_s("spawned"), "the process to go on")


def test_an_uninterruptible_process_that_is_let_go_is_not_stopped_later() -> None:
    with hand("processes") as client, target("uninterruptible") as process:
        wait_until(lambda: state(process.pid) == "D", "the uninterruptible call")
        answer = stop(client, process)
        assert client.do("lift", effect=answer["effect"])["held"] is False
        again = stop(client, process)
        assert again["held"] is False
        client.do("lift", effect=again["effect"])
        process.interrupt()
        wait_until(lambda: process.times_s("spawned"), "the process to go on")
        assert stop(client, process)["held"] is True


@pytest.mark.parametrize("end", ["lift", "kill"])
def test_a_signal_during_a_stop_is_delivered_afterwards(end: str) -> None:
    with hand("processes") as client, target(threads=3) as process:
        answer = stop(client, process)
        os.kill(process.pid, signal.SIGUSR1)
        stays(lambda: not process.times_s("signal"), "no signal is handled", for_s=0.2)
        if end == "lift":
            client.do("lift", effect=answer["effect"])
        else:
            client.process.kill()
        wait_until(lambda: process.times_s("signal"), "the signal")


def test_no_signal_is_lost_by_hundreds_of_stops() -> None:
    """Signals of one number that arrive during a stop wait in a queue."""
    with hand("processes") as client, target("counting") as process:
        identity = client.identity(process.pid)
        client.do("throttle", **identity, share=0.5, period_ms=10, lasts_s=3.0)
        count = 0
        while not any(line.get("event") == "ended" for line in client.lines):
            os.kill(process.pid, signal.SIGRTMIN)
            count += 1
            time.sleep(0.00001)
        assert client.event("ended")["evidence"]["stops"] > 100
        wait_until(lambda: process.signal_count() == count, "all signals")


def test_a_stopped_process_that_is_killed_is_reported_to_its_parent() -> None:
    with hand("processes") as client, target(threads=3) as process:
        answer = stop(client, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.process.wait(20) == -signal.SIGKILL
        ended = client.event("ended", answer["effect"])
        assert ended["why"] == "gone"
        assert ended["evidence"]["held"] is False


def test_a_process_that_another_hand_holds_is_refused() -> None:
    with hand("processes") as first, hand("processes") as second, target() as process:
        answer = stop(first, process)
        line = second.ask("stop", **second.identity(process.pid), lasts_s=LONG_S)
        assert "traces process" in line["unable"]["reason"]
        first.do("lift", effect=answer["effect"])
        process.wait_for_tick()
        assert stop(second, process)["held"] is True


@pytest.mark.parametrize("do", ["stop", "throttle", "kill"])
def test_another_process_with_the_pid_of_the_target_is_left_alone(do: str) -> None:
    fields = {"stop": {"lasts_s": 9}, "throttle": {"lasts_s": 9, "share": 0.5}, "kill": {}}
    with hand("processes") as client, target() as process:
        identity = client.identity(process.pid)
        identity["ticks"] += 1
        line = client.ask(do, **identity, **fields[do])
        assert line["error"]["field"] == "ticks"
        assert client.do("look", **identity) == {"effect": 3, "gone": True}
        process.wait_for_tick()
        process.wait_for_tick()


def test_a_throttled_process_runs_for_its_share_of_the_time() -> None:
    with hand("processes") as client, target("spinning") as process:
        identity = client.identity(process.pid)
        answer = client.do("throttle", **identity, share=0.3, period_ms=50, lasts_s=3.0)
        ended = client.event("ended", answer["effect"])
        assert ended["why"] == "expired"
        evidence = ended["evidence"]
        assert evidence["running_share"] == pytest.approx(0.3, abs=0.05)
        ticks_per_s = client.do("hello")["ticks_per_s"]
        cpu_share = evidence["cpu_ticks"] / ticks_per_s / evidence["lasted_s"]
        assert 0.02 < cpu_share < 0.4


def test_a_throttled_process_goes_on_when_the_hand_is_killed() -> None:
    with hand("processes") as client, target(threads=3) as process:
        identity = client.identity(process.pid)
        client.do("throttle", **identity, share=0.05, period_ms=2000, lasts_s=LONG_S)
        client.process.kill()
        killed_s = time.monotonic()
        assert process.wait_for_tick() - killed_s < 1.0


def test_a_throttled_process_with_new_threads_keeps_its_share() -> None:
    with hand("processes") as client, target("chain", threads=2) as process:
        identity = client.identity(process.pid)
        client.do("throttle", **identity, share=0.5, period_ms=100, lasts_s=2.0)
        evidence = client.event("ended")["evidence"]
        assert evidence["running_share"] == pytest.approx(0.5, abs=0.1)
        process.wait_for_tick()


def test_a_throttle_ends_with_its_process() -> None:
    with hand("processes") as client, target(threads=2) as process:
        identity = client.identity(process.pid)
        client.do("throttle", **identity, share=0.5, lasts_s=LONG_S)
        assert kill_if_same(process.pid, start_ticks(process.pid), signal.SIGKILL)
        assert process.process.wait(20) == -signal.SIGKILL
        assert client.event("ended")["why"] == "gone"


@pytest.mark.parametrize("do", ["stop", "throttle"])
def test_a_second_effect_on_a_process_is_refused(do: str) -> None:
    fields = {"stop": {}, "throttle": {"share": 0.5}}
    with hand("processes") as client, target() as process:
        identity = client.identity(process.pid)
        number = client.do(do, **identity, lasts_s=LONG_S, **fields[do])["effect"]
        for other in fields:
            error = client.ask(other, **identity, lasts_s=LONG_S, **fields[other])["error"]
            assert f"lift the effect {number}" in error["remedy"]
        client.do("lift", effect=number)
        process.wait_for_tick()
        assert stop(client, process)["held"] is True


@pytest.mark.skipif(
    os.readlink("/proc/self/ns/pid") != "pid:[4026531836]", reason="this is a container"
)
@pytest.mark.parametrize("do", ["stop", "kill"])
def test_init_of_the_machine_is_refused(do: str) -> None:
    """The start time is wrong, so that a broken check kills no machine."""
    with hand("processes") as client:
        identity = client.identity(1)
        lasting = {"lasts_s": 0.1} if do == "stop" else {}
        line = client.ask(do, pid=1, ticks=identity["ticks"] + 1, **lasting)
        assert "init of the machine" in line["error"]["remedy"]


def test_the_hand_does_not_stop_itself() -> None:
    with hand("processes") as client:
        own = client.identity(client.do("hello")["pid"])
        line = client.ask("stop", **own, lasts_s=LONG_S)
        assert line["error"]["field"] == "pid"
