"""The follower of a run on a job that runs already, over real hands on this machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from support.attach.hand_cluster import FollowedRun, followed_run

from chaoskit.attach.hands.hand import QUERY_S
from chaoskit.vocabulary import Event
from faults import Hang


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
