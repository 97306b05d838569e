"""The follower of a run on a job that runs already, over real hands on this machine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest
from support.attach.hand_cluster import FollowedRun, followed_run
from support.injecting import target_of
from support.waiting import wait_until

from chaoskit.attach.hands.hand import ACT_S, QUERY_S
from chaoskit.errors import NodeUnreachable
from chaoskit.substrate.core.actions import Action, Applied, CountedAction
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from faults import Cut, FreezeNode, Hang, Kill
from faults.network.partitions import TcpWatch
from faults.processes.signals import continued_afterwards, signal_all


@pytest.fixture
def undo() -> Iterator[UndoLog]:
    with closing(UndoLog()) as log:
        yield log


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
        (struck,) = run.records(Event.INJECTED)
    assert struck["waited_for"] == "llama-0 has no hand"
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


def test_an_undo_that_meets_a_silent_hand_continues_the_other_processes(
    tmp_path: Path, undo: UndoLog
) -> None:
    """Two processes of the silent node cost one wait."""
    with followed_run(2, tmp_path) as run:
        reached, silent = run.cluster.rank_nodes.values()
        first = silent.root
        silent.start()
        processes = [reached.root, first, silent.root]
        target = target_of(undo)
        with continued_afterwards(target, processes):
            signal_all(processes, signal.SIGSTOP)
            silent.silence()
            before_s = time.monotonic()
        assert time.monotonic() - before_s == pytest.approx(ACT_S, abs=ACT_S / 2)
        assert not reached.root.is_stopped()
        silent.answer()
        assert [words.partition(":")[0] for words in target.left_behind] == [
            f"process {process.pid} may be stopped" for process in (silent.root, first)
        ]


def test_a_stop_without_an_answer_may_have_acted_though_its_undo_has_none(
    tmp_path: Path, undo: UndoLog
) -> None:
    with followed_run(1, tmp_path) as run:
        (silent,) = run.cluster.rank_nodes.values()
        target = target_of(undo)
        silent.silence()
        with (
            pytest.raises(NodeUnreachable, match="stop") as unanswered,
            continued_afterwards(target, [silent.root]),
        ):
            silent.root.signal(signal.SIGSTOP)
        assert unanswered.value.may_have_acted
        assert len(target.left_behind) == 1
        silent.answer()


def test_events_of_a_node_are_counted_only_from_an_answer_on(tmp_path: Path) -> None:
    with followed_run(1, tmp_path) as run:
        (lost,) = run.cluster.rank_nodes.values()
        watch = TcpWatch([lost.root], "losses")
        lost.hand_process.kill()
        wait_until(lambda: not lost.hand.is_open, "the end of the hand")
        wait_until(lambda: watch.look() == 0, "a later look")
        with pytest.raises(NodeUnreachable):
            TcpWatch([lost.root], "losses")


class OnceListed:
    """A cluster whose node answers once.

    Args:
        process: the process of the node.
    """

    def __init__(self, process: Process) -> None:
        self._processes = [process]

    def node(self, node: str) -> list[Process]:
        if not self._processes:
            raise NodeUnreachable(f"{node} does not answer")
        return [self._processes.pop()]


def test_a_freeze_that_loses_its_node_after_the_stops_has_acted(
    tmp_path: Path, undo: UndoLog
) -> None:
    async def act() -> None:
        target = target_of(undo, OnceListed(root), process=root)
        async with aclosing(FreezeNode(rank=1, at_step=1).inject(target)) as evidence:
            await anext(evidence)

    with followed_run(1, tmp_path) as run:
        root = run.cluster.root("llama-0")
        with pytest.raises(NodeUnreachable, match="does not answer") as lost:
            asyncio.run(act())
        assert lost.value.may_have_acted
        assert not root.is_stopped()


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
