"""The follower of a run on a job that runs already, over real hands on this machine."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest
from support.attach.hand_cluster import FollowedRun, followed_run
from support.waiting import wait_until

from chaoskit.attach.hands.hand import QUERY_S
from chaoskit.errors import NodeUnreachable
from chaoskit.substrate.core.actions import Action, Applied, CountedAction
from chaoskit.vocabulary import Event
from faults import Cut, Hang, Kill
from faults.processes.signals import signal_all


def test_a_step_has_the_time_at_which_its_line_arrived(tmp_path: Path) -> None:
    async def story(run: FollowedRun) -> None:
        run.cluster.show_step(7, ago_s=4.0)
        run.cluster.show_step(8, ago_s=1.0)
        await run.until(lambda: len(run.records(Event.LOGGED)) == 2, "two steps")

    with followed_run(1, tmp_path) as run:
        asyncio.run(run.drive(story))
        earlier, later = run.records(Event.LOGGED)
    assert (later.t_ns - earlier.t_ns) / 1e9 == pytest.approx(3.0, abs=0.1)
    assert earlier["late_ns"] >= 4e9
    assert run.follower.reader.first_ns == earlier.t_ns


def test_a_silent_hand_stops_the_event_loop_once(tmp_path: Path) -> None:
    """The fault is due, and its rank is on the node whose hand is silent."""
    pauses_s = list[float]()

    async def story(run: FollowedRun) -> None:
        run.cluster.rank_nodes["llama-0"].silence()
        run.cluster.show_step(1)
        end_s = (before_s := time.monotonic()) + 4 * QUERY_S
        while before_s < end_s:
            await asyncio.sleep(0.001)
            now_s = time.monotonic()
            pauses_s.append(now_s - before_s)
            before_s = now_s
        run.cluster.rank_nodes["llama-0"].answer()
        await run.until(lambda: run.records(Event.EVIDENCE), "evidence of the stop")

    with followed_run(1, tmp_path, Hang(rank=0, after_s=0.0)) as run:
        asyncio.run(run.drive(story))
    longest_s = sorted(pauses_s)[-2:]
    assert longest_s[1] == pytest.approx(QUERY_S, abs=0.5)
    assert longest_s[0] < QUERY_S / 2


def test_a_fault_waits_until_its_node_has_the_hand_that_it_needs(tmp_path: Path) -> None:
    """Each try makes one strike, and only the last one is recorded."""
    applied = list[str]()

    def apply(node: str, action: Action) -> Applied:
        applied.append(node)
        return CountedAction(lambda: 5, lambda: True)

    async def story(run: FollowedRun) -> None:
        run.cluster.show_step(1)
        (injection,) = run.follower.injections
        await run.until(lambda: injection.unreached, "a first try")
        assert injection.unreached == "llama-0 has no hand"
        run.cluster.applying = apply
        await run.until(lambda: run.records(Event.INJECTED), "the strike")

    with followed_run(2, tmp_path, Cut(rank=0, after_s=0.0)) as run:
        assert not asyncio.run(run.drive(story))
        assert len(run.records(Event.INJECTED)) == 1
    assert applied == ["llama-0"]


def test_a_fault_that_never_could_act_is_missed_with_the_reason(tmp_path: Path) -> None:
    async def story(run: FollowedRun) -> None:
        run.cluster.show_step(1)
        await asyncio.sleep(60.0)

    with followed_run(2, tmp_path, Cut(rank=0, after_s=0.0)) as run:
        asyncio.run(run.drive(story, deadline_s=1.5))
        (injection,) = run.follower.injections
    assert injection.missed == (
        "it could not act 0 s after the log showed a first step: llama-0 has no hand"
    )


def test_a_node_that_is_lost_between_two_signals_may_be_hit(tmp_path: Path) -> None:
    with followed_run(2, tmp_path) as run:
        reached, lost = run.cluster.rank_nodes.values()
        lost.hand_process.kill()
        wait_until(lambda: not lost.hand.is_open, "the end of the hand")
        with pytest.raises(NodeUnreachable) as refused:
            signal_all([lost.root, reached.root], signal.SIGKILL)
        assert not refused.value.may_have_acted
        assert reached.process.poll() is None
        with pytest.raises(NodeUnreachable) as unanswered:
            signal_all([reached.root, lost.root], signal.SIGKILL)
        assert unanswered.value.may_have_acted
        assert reached.process.wait(60) == -signal.SIGKILL


def test_a_node_without_a_hand_keeps_only_faults_back_that_may_strike_it(tmp_path: Path) -> None:
    async def story(run: FollowedRun) -> None:
        lost = run.cluster.rank_nodes["llama-1"]
        lost.hand_process.kill()
        await run.until(lambda: not lost.hand.is_open, "the end of the hand")
        run.cluster.show_step(1)
        await run.until(lambda: run.records(Event.EVIDENCE), "evidence of the kill")

    kill, *waiting = (
        Kill(rank=0, after_s=0.0),
        Kill(rank=1, after_s=0.0),
        Cut(rank=2, apart_from=(1,), after_s=0.0),
    )
    with followed_run(3, tmp_path, kill, *waiting) as run:
        asyncio.run(run.drive(story))
        assert run.cluster.rank_nodes["llama-0"].process.wait(60) == -signal.SIGKILL
        (struck,) = run.records(Event.INJECTED)
        states = [injection.state for injection in run.follower.injections]
        reasons = [injection.unreached for injection in run.follower.injections]
    assert (struck["what"], states) == (str(kill), ["confirmed", "planned", "planned"])
    assert reasons == ["", "the hand: it has ended", "the hand: it has ended"]


def test_guard_rails_see_both_sides_of_a_cut_at_the_strike(tmp_path: Path) -> None:
    async def story(run: FollowedRun) -> None:
        run.cluster.spared = {"llama-2": "pod llama-2 has the label protected=yes"}
        run.cluster.show_step(1)
        (injection,) = run.follower.injections
        await run.until(lambda: injection.missed, "the refusal")

    fault = Cut(rank=0, side=(1,), apart_from=(2,), after_s=0.0)
    with followed_run(3, tmp_path, fault) as run:
        asyncio.run(run.drive(story))
        (injection,) = run.follower.injections
    assert run.cluster.asked_to_spare == [("llama-0", "llama-1", "llama-2")]
    assert injection.missed.endswith("pod llama-2 has the label protected=yes")
