"""The account of a run: every nanosecond is counted once, under its true cause."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from chaoskit.journal import Record
from chaoskit.observe.histograms import RecoveryTimes
from chaoskit.report.html import write_html
from chaoskit.report.store import read_outcomes, write_outcome
from chaoskit.report.summary import render_summary
from chaoskit.report.times import render_account
from chaoskit.runlog.account import Accountant, account_for
from chaoskit.runlog.account.time_account import STANDING_PHASES, TimeAccount
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import RECOVERY_PHASES, Event
from faults import Hang, Kill

MS = 1_000_000


#: A loss after which no rank of the next world is ready, without the time of the next step.
WAITED_FOR: dict[str, Any] = {
    "cause": "exited",
    "injected": True,
    "waits": True,
    "early": False,
    "back": 0,
}
WAITED_FOR |= {
    "struck": 40,
    "notice": 60,
    "wait": 50,
    "quiesce": 50,
    "leave": 0,
    "form": 100,
    "restore": 100,
}


class Script:
    """A writer of the journals of a run with a known account.

    All steps take ``step_ms``.
    """

    def __init__(self, step_ms: int, world: int) -> None:
        self.step_ms, self.full, self.world = step_ms, world, world
        self.t_ms, self.step, self.generation = 1000, 0, 1
        self.records: list[Record] = []
        self.expected: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.degraded_ms = 0
        self.names = [f"node{rank}.0" for rank in range(world)]
        self.workers = world
        self.history: list[
            tuple[int, bool, int]
        ] = []  # plain steps: productive ms, in a small world?, stall in ms

    def write(self, event: Event | str, source: str = "coordinator", **fields: Any) -> None:
        self.records.append(Record(self.t_ms * MS, source, str(event), fields))

    def spend(self, part: str, cause: str, ms: int) -> None:
        self.t_ms += ms
        self.book(part, cause, ms)

    def book(self, part: str, cause: str, ms: int) -> None:
        self.expected[part] += ms
        if part != "productive":
            self.causes[cause] += ms

    def plan(self, *, abort: bool) -> None:
        members = [
            {"rank": rank, "worker": name, "node": "n"} for rank, name in enumerate(self.names)
        ]
        self.write(Event.PLAN, generation=self.generation, abort=abort, members=members)

    def begin(self, start_ms: int, wait_ms: int, form_ms: int) -> None:
        self.write(Event.STARTED, "harness", nodes=self.full, spares=0, unix_ns=0)
        self.spend("start-up", "start-up", start_ms)
        self.write(Event.SPARE_READY, worker=self.names[0])
        self.spend("waiting for nodes", "waiting for nodes", wait_ms)
        self.plan(abort=True)
        self.spend("start-up", "start-up", form_ms)
        self.write(Event.SETTLED, generation=1)

    def commit(self, took_ms: int, stall_ms: int = 0) -> None:
        """Let the ranks commit one after the other, in the last third of the step at most."""
        skew_ms = took_ms // (3 * self.world)
        self.t_ms += took_ms - skew_ms * (self.world - 1)
        for rank, name in enumerate(self.names):
            self.t_ms += skew_ms if rank else 0
            place = {
                "step": self.step,
                "generation": self.generation,
                "rank": rank,
                "world": self.world,
            }
            self.write(
                Event.COMMIT,
                name,
                **place,
                loss=1.0,
                grad_sum=0,
                stall_ms=stall_ms if rank == 0 else 0.0,
            )
        self.step += 1

    def good_step(self, stall_ms: int = 0) -> None:
        self.commit(self.step_ms, stall_ms)
        self.book("productive", "", self.step_ms - stall_ms)
        self.book("checkpoint stalls", "checkpoint", stall_ms)
        self.degraded_ms += self.step_ms if self.world < self.full else 0

    def first_step(self, took_ms: int, allowed_ms: int, part: str, cause: str) -> None:
        self.commit(took_ms)
        self.book("productive", "", min(took_ms, allowed_ms))
        self.book(part, cause, max(0, took_ms - allowed_ms))
        self.degraded_ms += min(took_ms, allowed_ms) if self.world < self.full else 0

    def strike(
        self, worker: str, fault: str = "fault0", what: str = "Kill()", nodes: tuple[str, ...] = ()
    ) -> None:
        self.write(Event.INJECTED, "harness", fault=fault, worker=worker, what=what, nodes=nodes)

    def lose(self, loss: dict[str, Any]) -> None:
        """Lose a rank in the middle of a step; with ``back``, training goes back so many steps."""
        cause, victim, before = loss["cause"], self.names[-1], self.world
        struck_ms, notice_ms = min(loss["struck"], self.step_ms), loss["notice"]
        if loss["injected"]:
            self.spend("recomputed", cause, struck_ms)
            self.strike(victim)
            self.spend("detected", cause, notice_ms)
        else:
            self.t_ms += struck_ms + notice_ms
            self.book("recomputed", cause, min(self.step_ms, struck_ms + notice_ms))
            self.book("detected", cause, max(0, struck_ms + notice_ms - self.step_ms))
        self.write(Event.DETECTED, worker=victim, rank=self.world - 1, cause=cause, detail="")
        self.workers += 1
        newcomer = f"node9.{self.workers}"
        if loss["waits"]:
            self.spend("waiting for nodes", cause, loss["wait"])
            self.write(Event.SPARE_READY, worker=newcomer)
        self.spend("quiesced", cause, loss["quiesce"])
        old = self.generation
        self.generation += 1
        shrinks = self.world > 1 and not loss["waits"]
        self.names = self.names[:-1] + ([] if shrinks else [newcomer])
        self.world = len(self.names)
        self.plan(abort=True)
        self.spend("quiesced", cause, loss["leave"])
        self.write(Event.QUIESCED, self.names[0], generation=old, rank=0)
        self.spend("regrouped", cause, loss["form"] // 4)
        for name in self.names[1:]:
            self.write(Event.REGROUPED, name, generation=self.generation, rank=1)
        self.spend("regrouped", cause, loss["form"] // 2)
        if (
            loss["early"] and self.world > 1
        ):  # a rank restores its state before another has built its group
            self.write(Event.RESTORED, self.names[-1], generation=self.generation, rank=0)
        self.spend("regrouped", cause, loss["form"] - loss["form"] // 4 - loss["form"] // 2)
        self.write(Event.REGROUPED, self.names[0], generation=self.generation, rank=0)
        self.spend("restored", cause, loss["restore"])
        self.write(Event.RESTORED, self.names[-1], generation=self.generation, rank=0)
        self.throw_away(min(loss["back"], len(self.history)), cause)
        allowed_ms = self.step_ms * before // self.world if before > self.world else self.step_ms
        self.first_step(loss["first"], allowed_ms, "first good step", cause)

    def throw_away(self, count: int, cause: str) -> None:
        for _ in range(count):
            self.step -= 1
            was_ms, small, stall_ms = self.history.pop()
            self.expected["productive"] -= was_ms
            self.expected["checkpoint stalls"] -= stall_ms
            self.causes["checkpoint"] -= stall_ms
            self.book("recomputed", cause, was_ms + stall_ms)
            self.degraded_ms -= was_ms + stall_ms if small else 0

    def resize(self, steps: int, took_ms: int) -> None:
        """Change the world by plan, with effect some steps later."""
        self.generation += 1
        self.workers += 1
        before, old = self.names, self.generation - 1
        self.names = [*self.names, f"node8.{self.workers}"]
        self.plan(abort=False)
        grown, self.names = self.names, before
        self.generation = old
        for _ in range(steps):
            self.good_step()
            self.remember()
        self.generation, self.names, self.world = old + 1, grown, len(grown)
        self.write(Event.REGROUPED, grown[0], generation=self.generation, rank=0)
        self.first_step(took_ms, self.step_ms, "resize", "planned resize")

    def remember(self, stall_ms: int = 0) -> None:
        self.history.append((self.step_ms - stall_ms, self.world < self.full, stall_ms))

    def account(self, closing_ms: int) -> TimeAccount:
        self.spend("closing", "closing", closing_ms)
        self.write(Event.JOB_ENDED, ok=True, reason="")
        return account_for(self.records, self.t_ms * MS)


times = st.integers(0, 300)
losses = st.fixed_dictionaries(
    dict.fromkeys(("struck", "notice", "wait", "quiesce", "leave", "form", "restore"), times)
    | {
        "kind": st.just("loss"),
        "cause": st.sampled_from(["exited", "hung", "node lost"]),
        "injected": st.booleans(),
        "waits": st.booleans(),
        "early": st.booleans(),
        "back": st.integers(0, 3),
        "first": st.integers(1, 900),
    }
)
steps = st.fixed_dictionaries(
    {"kind": st.just("steps"), "count": st.integers(1, 5), "stall": st.integers(0, 40)}
)
resizes = st.fixed_dictionaries(
    {"kind": st.just("resize"), "steps": st.integers(0, 2), "first": st.integers(1, 900)}
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step_ms=st.integers(60, 300),
    world=st.integers(1, 4),
    start=st.tuples(times, times, times),
    acts=st.lists(st.one_of(steps, losses, resizes), max_size=8),
    closing_ms=times,
)
def test_time_is_spent_on_what_it_was_spent_on(
    step_ms: int,
    world: int,
    start: tuple[int, int, int],
    acts: list[dict[str, Any]],
    closing_ms: int,
) -> None:
    script = Script(step_ms, world)
    script.begin(*start)
    for act in [{"kind": "steps", "count": 3, "stall": 0}, *acts]:
        if act["kind"] == "steps":
            for _ in range(act["count"]):
                script.good_step(act["stall"])
                script.remember(act["stall"])
        else:
            if act["kind"] == "loss":
                script.lose(act)
            else:
                script.resize(act["steps"], act["first"])
            script.history.clear()  # a first step is spent on several parts: no loss goes back beyond it
            script.good_step()
            script.remember()
    account = script.account(closing_ms)
    assert_equal(dict(account.parts()), script.expected)
    assert_equal(account.lost_s, script.causes)
    assert account.degraded_s * 1000 == pytest.approx(script.degraded_ms, abs=len(acts) + 0.1)
    assert account.failures == sum(act["kind"] == "loss" for act in acts)
    assert_adds_up(account)


def assert_equal(booked_s: dict[str, float], expected_ms: Counter[str]) -> None:
    """Assert that the accounts are equal, up to the fractions of a millisecond that a step has in a
    smaller world.
    """
    for name in {*booked_s, *expected_ms}:
        assert booked_s.get(name, 0) * 1000 == pytest.approx(expected_ms[name], abs=10), name


def assert_adds_up(account: TimeAccount) -> None:
    assert sum(seconds for _, seconds in account.parts()) == pytest.approx(account.wall_s, abs=1e-6)
    assert account.productive_s + sum(account.lost_s.values()) == pytest.approx(
        account.wall_s, abs=1e-6
    )
    assert min(0.0, *account.lost_s.values(), *(seconds for _, seconds in account.parts())) >= 0
    ratios = (0.0, account.goodput, account.ettr_wall, account.ettr_productive, 1.0)
    assert all(ratio <= next_ratio + 1e-9 for ratio, next_ratio in pairwise(ratios))
    assert (
        0
        <= account.missing_s
        <= account.degraded_s + 1e-9
        <= account.productive_s + account.stalled_s + 2e-9
    )


workers = st.sampled_from(["node0.0", "node0.1", "node1.0"])
generations, numbers = st.integers(1, 4), st.integers(0, 6)
commit = st.fixed_dictionaries(
    {
        "step": numbers,
        "generation": generations,
        "world": st.integers(1, 3),
        "loss": st.just(1.0),
        "stall_ms": st.floats(0, 1e4),
    }
)
members = st.lists(workers, unique=True).map(
    lambda names: [{"worker": name, "rank": 0, "node": "n"} for name in names]
)
any_records = st.lists(
    st.tuples(
        st.integers(0, 10**10),
        st.one_of(
            st.tuples(st.sampled_from([Event.COMMIT, Event.SKIP]), commit),
            st.tuples(
                st.just(Event.DETECTED),
                st.fixed_dictionaries(
                    {
                        "worker": workers,
                        "rank": st.none() | numbers,
                        "cause": st.just("hung"),
                        "detail": st.just(""),
                    }
                ),
            ),
            st.tuples(
                st.just(Event.PLAN),
                st.fixed_dictionaries(
                    {"generation": generations, "abort": st.booleans(), "members": members}
                ),
            ),
            st.tuples(
                st.sampled_from(
                    [Event.QUIESCED, Event.REGROUPED, Event.RESTORED, Event.ADOPT, Event.SETTLED]
                ),
                st.fixed_dictionaries({"generation": generations}),
            ),
            st.tuples(
                st.sampled_from([Event.SPARE_READY, Event.INJECTED, Event.ACTED]),
                st.fixed_dictionaries(
                    {
                        "worker": workers,
                        "what": st.just("Kill()"),
                        "fault": st.sampled_from(["fault0", "fault1"]),
                        "nodes": st.sampled_from([[], ["node0"]]),
                    }
                ),
            ),
            st.tuples(st.just(Event.NONFINITE), st.fixed_dictionaries({"step": numbers})),
            st.tuples(st.just(Event.JOB_ENDED), st.fixed_dictionaries({"ok": st.booleans()})),
        ),
    ),
    max_size=40,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_records, st.booleans(), st.integers(0, 10**9))
def test_any_journal_adds_up(lines: list[Any], ordered: bool, more_ns: int) -> None:
    """The parts add up for any journal, for one that makes no sense, and for late records."""
    records = [Record(t_ns, "x", str(event), fields) for t_ns, (event, fields) in lines]
    records = sorted(records, key=lambda record: record.t_ns) if ordered else records
    accountant = Accountant(0)
    last_ns = 0
    for record in records:
        accountant.take_in(record)
        last_ns = max(last_ns, record.t_ns)
        account = accountant.account(last_ns + more_ns)
        assert account.wall_s == pytest.approx((last_ns + more_ns) / 1e9)
        assert_adds_up(account)
        whole = accountant.recently(60.0, last_ns + more_ns)  # longer than the run
        assert (whole.wall_s, whole.goodput) == (
            pytest.approx(account.wall_s),
            pytest.approx(account.goodput),
        )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    acts=st.lists(losses, min_size=1, max_size=3),
    swaps=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12),
    looks=st.sets(st.integers(0, 60)),
)
def test_phases_of_recoveries_add_up_to_the_recoveries(
    acts: list[dict[str, Any]], swaps: list[tuple[int, int]], looks: set[int]
) -> None:
    """The phases add up at any time, and for any order of the records."""
    script = Script(100, 3)
    script.begin(0, 0, 0)
    script.records[0].fields["spares"] = 1
    for act in acts:
        script.good_step()
        script.lose(act)
        script.good_step()
    records = script.records
    for swap in swaps:
        first, second = (place % len(records) for place in swap)
        records[first], records[second] = records[second], records[first]
    times = RecoveryTimes()
    accountant = Accountant(0, on_setback=times.observe)
    for place, record in enumerate(records):
        accountant.take_in(record)
        if place in looks:
            times.count_later_phases()
        assert_recoveries_add_up(times)


def assert_recoveries_add_up(times: RecoveryTimes) -> None:
    assert (
        sum(times.phases[phase].sum_ns for phase in STANDING_PHASES if phase in times.phases)
        == times.total.sum_ns
    )


def test_a_record_that_comes_late_moves_no_recovery() -> None:
    """A commit of the first good step may be read after another rank's next commit."""
    script = Script(100, 2)
    script.begin(0, 0, 0)
    script.records[0].fields["spares"] = 1  # no spare becomes ready again
    script.good_step()
    script.lose(WAITED_FOR | {"first": 90})
    script.good_step()
    late = script.records.pop(-3)  # the second rank's commit of the first good step
    assert (late.event, late["step"], late["rank"]) == (Event.COMMIT, 1, 1)
    script.records.append(Record(script.t_ms * MS, late.source, late.event, late.fields))
    times = RecoveryTimes()
    accountant = Accountant(on_setback=times.observe)
    for record in script.records:
        accountant.take_in(record)
        times.count_later_phases()
        assert_recoveries_add_up(times)
    (setback,) = accountant.setbacks
    assert times.total.sum_ns == 435 * MS == round((setback.seconds or 0) * 1e9)


def test_the_ratios_of_the_last_minutes() -> None:
    """The ratios omit a fault that is long over; time counts when it was spent, even if it turns
    out to be lost.
    """
    script = Script(1000, 2)
    script.begin(5000, 0, 0)
    for _ in range(10):
        script.good_step()
        script.remember()
    accountant = Accountant()
    for record in script.records:
        accountant.take_in(record)
    now_ns = script.t_ms * MS
    assert accountant.account(now_ns).goodput == pytest.approx(10 / 15)
    assert accountant.recently(4.0, now_ns).goodput == pytest.approx(1.0)
    assert accountant.recently(12.0, now_ns).goodput == pytest.approx(10 / 12)
    assert accountant.recently(600.0, now_ns).goodput == pytest.approx(10 / 15)
    stands = accountant.recently(4.0, now_ns + 2000 * MS)
    assert (stands.wall_s, stands.goodput) == (pytest.approx(4.0), pytest.approx(0.5))
    assert accountant.recently(4.0, now_ns + 9000 * MS).goodput == 0
    loss = {
        "cause": "exited",
        "injected": True,
        "waits": False,
        "early": False,
        "struck": 0,
        "notice": 0,
        "wait": 0,
        "quiesce": 0,
    }
    script.records.clear()
    script.lose(loss | {"leave": 0, "form": 0, "restore": 0, "back": 3, "first": 1000})
    for _ in range(4):
        script.good_step()
    for record in script.records:
        accountant.take_in(record)
    now_ns = script.t_ms * MS
    assert accountant.recently(4.0, now_ns).goodput == pytest.approx(1.0)
    assert accountant.recently(8.0, now_ns).goodput == pytest.approx(5 / 8)  # three steps were lost
    whole, parts = accountant.account(now_ns), accountant.recently(3000.0, now_ns)
    assert (parts.goodput, parts.ettr_wall) == (
        pytest.approx(whole.goodput),
        pytest.approx(whole.ettr_wall),
    )


def test_the_ratios_say_what_they_say() -> None:
    script = Script(100, 2)
    script.begin(500, 100, 100)
    for _ in range(10):
        script.good_step()
    script.lose(WAITED_FOR | {"first": 100})
    account = script.account(100)
    assert account.wall_s == pytest.approx(0.7 + 1.0 + 0.4 + 0.1 + 0.1)
    assert account.goodput == pytest.approx(1.1 / 2.3)
    assert account.ettr_wall == pytest.approx(1.1 / 2.3)
    assert account.ettr_productive == pytest.approx(1.1 / 1.5)
    assert (account.mean_recovery_s, account.mean_between_failures_s) == (
        pytest.approx(0.4),
        pytest.approx(1.1),
    )
    plain = account.plain()
    assert (plain["goodput"], plain["lost_s"]["exited"]) == (account.goodput, pytest.approx(0.4))


def test_a_loss_after_the_commit_of_the_others_costs_no_step() -> None:
    """The other ranks commit the step that seemed to be interrupted."""
    script = Script(100, 2)
    script.begin(0, 0, 0)
    script.good_step()
    script.t_ms += 90
    script.write(Event.DETECTED, worker="node1.0", rank=1, cause="exited", detail="")
    script.t_ms += 10
    script.names = script.names[:1]
    script.commit(0)
    account = account_for(script.records)
    assert (account.recomputed_s, account.productive_s) == (0, pytest.approx(0.19))


@pytest.mark.parametrize(
    ("strikes", "expected"),
    [
        ([("node0.0", "fault0", "Straggle()", ())], ("", 100)),
        (
            [("node0.0", "fault0", "Straggle()", ()), ("node1.0", "fault1", "Kill()", ())],
            ("Kill()", 20),
        ),
        (
            [("node1.0", "fault0", "Kill()", ()), ("node0.0", "fault1", "Straggle()", ())],
            ("Kill()", 10),
        ),
        ([("node1.9", "fault0", "KillNode()", ("node1",))], ("KillNode()", 10)),
        ([("node1.9", "fault0", "Kill()", ())], ("", 100)),
    ],
)
def test_a_loss_is_the_doing_of_what_struck_that_worker(
    strikes: list[Any], expected: tuple[str, int]
) -> None:
    """A loss is caused by the fault that struck its worker, whatever struck other workers before.

    If no fault did, the last usual step before the notice was interrupted.

    Args:
        expected: fault, and when it began after the last commit, in milliseconds.
    """
    script = Script(100, 2)
    script.begin(0, 0, 0)
    script.good_step()
    script.good_step()
    began_ms = script.t_ms
    for strike in strikes:
        script.t_ms += 10
        script.strike(*strike)
    script.t_ms = began_ms + 140
    script.write(Event.DETECTED, worker="node1.0", rank=1, cause="exited", detail="")
    accountant = Accountant()
    for record in script.records:
        accountant.take_in(record)
    assert accountant.open is not None
    assert (accountant.open.fault, accountant.open.begun_ns // MS - began_ms) == (
        expected[0],
        expected[1],
    )


def test_a_loss_is_the_doing_of_a_later_act_of_a_fault() -> None:
    script = Script(100, 2)
    script.begin(0, 0, 0)
    script.good_step()
    began_ms = script.t_ms
    script.t_ms += 10
    script.strike("node0.0", what="CrashLoop()")
    script.t_ms += 20
    script.write(Event.ACTED, "harness", fault="fault0", worker="node1.0", what="CrashLoop()")
    script.write(Event.DETECTED, worker="node1.0", rank=1, cause="exited", detail="")
    accountant = Accountant()
    for record in script.records:
        accountant.take_in(record)
    assert accountant.open is not None
    assert (accountant.open.fault, accountant.open.begun_ns // MS - began_ms) == ("CrashLoop()", 30)


@pytest.mark.slow
@pytest.mark.promise("the parts add up to the wall time, to the nanosecond")
def test_a_real_run_adds_up(chaos: Any, tmp_path: Path) -> None:
    """The account of a run covers its wall time, and agrees with the timeline, which reads the same
    records.
    """
    plan: dict[str, Any] = {"steps": 20, "until": {"spares": 1}, "options": {"schedule_steps": 20}}
    outcome = chaos.run(
        "gpt", nodes=2, spares=1, twin=False, faults=[Kill(rank=1, at_step=8)], **plan
    )
    account = outcome.account
    assert account is not None
    assert_adds_up(account)
    assert account.wall_s == pytest.approx(outcome.wall_s)
    assert (account.failures, account.steps) == (1, 20)
    recovery = outcome.recovery
    for span in recovery.spans:
        if span.name in RECOVERY_PHASES[:4]:  # the timeline reads the journals in its own way
            assert account.recovery_s[span.name] == pytest.approx(span.seconds, abs=0.001)
    between_commits_s = sum(
        point.seconds for point in outcome.steps[1:]
    )  # productive or lost, all of it
    training_s = (
        account.productive_s + account.lost_s["exited"] + account.lost_s.get("checkpoint", 0.0)
    )
    assert training_s > between_commits_s, "the first step is productive, too"
    assert account.lost_s["exited"] < recovery.seconds + 0.001
    write_outcome(outcome, tmp_path)
    assert read_outcomes(tmp_path)[0].account == account
    write_html([outcome], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Where the time went" in page
    paper = io.StringIO()
    console = Console(width=200, file=paper)
    console.print(render_account(account))
    console.print(render_summary([outcome]))
    printed = paper.getvalue()
    for convention in ("per wall-clock hour", "per productive hour", "productive / wall time"):
        assert convention in page
        assert convention in printed


@pytest.mark.promise("*Degraded* is the productive time with fewer ranks than the full world")
def test_a_real_hang_is_a_cause_and_a_smaller_world_is_seen(chaos: Any) -> None:
    """The time without progress counts for its cause; steps of one rank of two count as degraded."""
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "steps": 20,
        "until": {"world": 2},
        "deadline_s": 120.0,
    }
    outcome = chaos.run(STEADY, twin=False, faults=[Hang(rank=1, at_step=5)], **plan)
    account = outcome.account
    assert account is not None
    assert_adds_up(account)
    assert account.lost_s["stopped"] > 0
    assert 0 < account.degraded_s < account.productive_s
    assert account.missing_s == pytest.approx(account.degraded_s / 2)
