"""Planted mistakes in the decisions of workers and slots: some simulated history breaks a law with each.

The simulated workers and slots run the code of the product. A mistake in it that no history notices
would say that they do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from simulation import known
from simulation.history import run
from simulation.processes import pieces, worker

from chaoskit.runtime.group.generations import (
    FirstMove,
    Generation,
    GenerationChange,
    GenerationCourse,
    MemberProgress,
)

#: A planted mistake must be noticed within so many histories.
PATIENCE = 4000


def waits_in_a_broken_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that waits for a step boundary waits on when its generation is given up."""

    def give_up(
        self: GenerationCourse[Generation], generation: Generation
    ) -> GenerationChange[Generation] | None:
        generation.broken = True
        return None

    monkeypatch.setattr(GenerationCourse, "give_up", give_up)


def commits_after_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank commits in a generation though a newer one may have been told of its step."""
    monkeypatch.setattr(GenerationCourse, "begin_step_change", lambda self, generation: True)


def reports_a_step_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer generation is told of a step that is just changing."""
    monkeypatch.setattr(GenerationCourse, "may_report", lambda self, generation: True)


def trains_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is behind trains on from its own step."""
    genuine = Generation.first_move

    def first_move(self: Generation, step: int) -> FirstMove:
        move = genuine(self, step)
        return FirstMove.TRAIN if move is FirstMove.HEAL and step > 0 else move

    monkeypatch.setattr(Generation, "first_move", first_move)


def follows_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are to have the step of the member that is furthest behind."""

    def target(self: Generation) -> MemberProgress:
        return min(self.standings, key=lambda standing: standing.step)

    monkeypatch.setattr(Generation, "target", property(target))


def ends_the_last_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that no source gives the newer state gives up its own, too."""
    monkeypatch.setattr(worker, "may_appeal", lambda step, failures: False)


#: The seed of a history that has noticed the mistake, which is tried first, and the law that is broken.
MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, str]] = {
    waits_in_a_broken_generation: (184, "not over|is well and was given up"),
    commits_after_its_report: (
        10161,
        "took step|wrong state|other states|committed in generations|the state is there",
    ),
    reports_a_step_that_changes: (
        20618,
        "took step|wrong state|other states|goes back to step|the state is there",
    ),
    trains_behind_the_others: (141, "goes back to step|wrong state|other states|not over"),
    follows_the_slowest: (5681, "goes back to step"),
    ends_the_last_replica: (34009, "every replica was lost"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_of_workers_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Some history of a replicated job breaks a law with a mistake in a worker's decisions."""
    mistake(monkeypatch)
    notice(*MISTAKES[mistake], "replicated")


def overwrites_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest complete copy is overwritten, whatever is protected."""

    def write_order(slots: Any, protected_step: int) -> list[int]:
        free = [index for index, slot in enumerate(slots) if not slot.taken]
        return sorted(free, key=lambda index: slots[index].recency, reverse=True)

    monkeypatch.setattr(pieces, "write_order", write_order)


def test_a_mistake_of_slots_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some history of a sharded job loses its state if the newest complete copy is overwritten."""
    overwrites_what_is_kept(monkeypatch)
    notice(727, "every replica was lost|is stored|goes on unseen", "sharded")


def notice(first: int, law: str, kind: str) -> None:
    """Search for a history that breaks ``law``, and no other one before it."""
    for seed in [first, *known.seeds(kind), *range(PATIENCE)]:
        history = run(seed, kind)
        if history.broken:
            assert re.search(law, history.broken), f"seed {seed}: {history.broken}"
            return
    raise AssertionError(f"{PATIENCE} histories went well")
