"""The follower of a run on a job that runs already, over real hands on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.attach.hand_cluster import FollowedRun, followed_run

from chaoskit.vocabulary import Event


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
