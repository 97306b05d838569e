"""Selection of the commits to copy: at most a share of the time for copies, at most some seconds of
work at risk.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.daemon.copy_budget import COST_SHARE, RISK_S, CopyBudget


class Job:
    """Job that commits steps on demand, and makes the copies that the budget asks for.

    Attributes:
        at_s: step -> the time of its commit.
        copies: steps that were copied, in order.
    """

    def __init__(
        self, *, every_step: bool = False, alone: bool = False, cost_s: float = 0.025
    ) -> None:
        self.budget = CopyBudget(every_step=every_step)
        self.step, self.now_s, self.cost_s = -1, 100.0, cost_s
        self.generation = 1
        self.at_s: dict[int, float] = {}
        self.copies: list[int] = []
        self.begin(alone=alone)

    def begin(self, *, alone: bool = False) -> None:
        self.budget.begin(alone=alone)

    def commit(self, step_s: float, *, fails: bool = False) -> bool:
        """Commit a step, and return whether its state was to be copied."""
        self.step, self.now_s = self.step + 1, self.now_s + step_s
        self.at_s[self.step] = self.now_s
        if not self.budget.wants(self.step, self.generation, self.now_s):
            return False
        if fails:
            self.budget.failed(self.step)
        else:
            self.copies.append(self.step)
            self.budget.copied(self.step, self.cost_s)
        return True


def test_copies_take_one_percent_of_steps_that_are_alike() -> None:
    """A copy costs 25 ms of each 17 steps of 150 ms."""
    job = Job(cost_s=0.025)
    for _ in range(100):
        job.commit(0.15)
    assert job.copies == [0, 1, 18, 35, 52, 69, 86]
    assert job.budget.every == 17


@pytest.mark.parametrize(
    ("settings", "every"), [({"every_step": True}, 1), ({"alone": True}, 1), ({}, 17)]
)
def test_each_commit_is_copied_where_that_is_asked_for_or_no_other_rank_has_the_state(
    settings: dict[str, bool], every: int
) -> None:
    job = Job(**settings)
    for _ in range(40):
        job.commit(0.15)
    assert job.budget.every == every
    assert (len(job.copies) == 40) == (every == 1)


def test_the_first_state_of_a_membership_is_copied() -> None:
    """The first state is copied at once; afterwards the interval that was known before holds."""
    job = Job()
    for _ in range(25):
        job.commit(0.15)
    assert job.copies[-1] == 18
    job.begin()
    for _ in range(20):
        job.commit(0.15)
    assert job.copies[-2:] == [25, 42]


def test_a_membership_that_waited_for_a_step_boundary_begins_with_a_copy() -> None:
    """The plan of the membership comes earlier: a commit of the membership before is none of its
    states.
    """
    job = Job()
    for _ in range(25):
        job.commit(0.15)
    job.begin()
    for _ in range(3):
        job.commit(0.15)
    job.generation = 2
    for _ in range(20):
        job.commit(0.15)
    assert job.copies[-3:] == [25, 28, 45]


def test_no_copy_waits_for_half_a_minute_of_work() -> None:
    """The limit holds at any cost of a copy, also when steps become longer after the newest
    copy.
    """
    job = Job(cost_s=30.0)
    for _ in range(40):
        job.commit(2.0)
    assert job.budget.every == RISK_S / 2
    longer = Job(cost_s=0.0995)
    while longer.copies[-1:] != [longer.step] or longer.step < 20:
        longer.commit(0.1)
    assert longer.budget.every == 100
    newest = longer.copies[-1]
    for _ in range(3):
        longer.commit(12.0)
    assert longer.copies[-1] == newest + 2


def test_a_step_that_takes_longer_than_that_is_copied_each_time() -> None:
    job = Job(cost_s=5.0)
    for _ in range(10):
        job.commit(45.0)
    assert job.copies == list(range(10))


def test_a_copy_that_fails_is_tried_again_ever_more_seldom() -> None:
    job = Job()
    for _ in range(30):
        job.commit(0.15)
    tried = []
    while len(tried) < 6:
        if job.commit(0.15, fails=True):
            tried.append(job.step)
    assert tried == [35, 36, 39, 46, 61, 92]
    while not job.commit(0.15):
        pass
    assert job.budget.every == 17


def test_what_is_let_go_is_known_ahead() -> None:
    """Training therefore does not wait for a copy that is not going to be made."""
    job = Job()
    for _ in range(60):
        skipped_until = job.budget.skipped_until
        copied = job.commit(0.15)
        assert copied == (job.step > skipped_until)


@pytest.mark.parametrize(
    ("settings", "due"), [({}, 18), ({"every_step": True}, 0), ({"alone": True}, 0)]
)
def test_training_waits_longer_for_a_copy_that_is_made_now_and_then(
    settings: dict[str, bool], due: int
) -> None:
    """Training waits longer for a rare copy.

    An overtaken copy is not missed if each commit is copied.
    """
    job = Job(**settings)
    for _ in range(2):
        job.commit(0.15)
    assert job.budget.due == due
    job.commit(0.15, fails=True)
    assert job.budget.due == due


Steps = st.lists(
    st.tuples(
        st.floats(min_value=1e-4, max_value=60.0),
        st.sampled_from(["commit", "commit", "commit", "fail", "membership"]),
    ),
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(Steps, st.floats(min_value=0.0, max_value=10.0), st.booleans(), st.booleans())
def test_between_two_copies_lie_no_more_steps_than_said_and_no_more_seconds_than_may(
    acts: list[tuple[float, str]], cost_s: float, every_step: bool, alone: bool
) -> None:
    """The steps to compute again, if no copy failed and all ranks end, are at most ``every``."""
    job, newest, every, failed = (
        Job(every_step=every_step, alone=alone, cost_s=cost_s),
        -1,
        1,
        False,
    )
    for step_s, act in acts:
        if act == "membership":
            job.begin(alone=alone)
            assert job.commit(step_s), "the first state of a membership"
        elif act == "fail":
            failed |= job.commit(step_s, fails=True)
        else:
            job.commit(step_s)
        if job.copies[-1:] == [job.step]:
            newest, every, failed = job.step, job.budget.every, False
        if newest < 0 or failed:
            continue
        assert job.step + 1 - newest <= every
        at_risk_s = job.now_s - job.at_s[newest]
        assert at_risk_s + job.budget.step_s <= RISK_S + 1e-6 or job.step == newest
        if every_step or alone:
            assert newest == job.step


@settings(max_examples=examples(100), deadline=None, database=None)
@given(st.floats(min_value=0.001, max_value=20.0), st.floats(min_value=1e-4, max_value=5.0))
def test_copies_take_no_more_than_their_share(step_s: float, cost_s: float) -> None:
    """Copies are not rarer than the share asks for, unless too much work would be at risk without
    them.
    """
    job = Job(cost_s=cost_s)
    for _ in range(4):
        job.commit(step_s)
    every, step_s = (
        job.budget.every,
        job.budget.step_s,
    )  # as measured: differences of times are rounded
    most = max(1, math.floor(RISK_S / step_s))
    assert every <= most
    assert cost_s <= COST_SHARE * every * step_s * (1 + 1e-9) or every == most
    assert every == 1 or cost_s > COST_SHARE * (every - 1) * step_s * (1 - 1e-9)
