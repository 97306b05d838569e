"""Hooks of a job in real runs that are resized and broken: their events, moments, and number of
calls.
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.journal import Journal, read_journals
from chaoskit.process.progress_board import Board
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.group.regroup import Dismissed
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.suites.goals import JournalFlag, happened, worlds_seen
from chaoskit.vocabulary import Event, Phase
from faults import Fault, Kill, Scale, Straggle, TakeSpot, Target
from faults.evidence import Evidence
from faults.processes.signals import all_gone, look_up

JOB = str(Path(__file__).parents[2] / "jobs" / "training" / "hooked.py")
POLICY = ElasticPolicy(min_replicas=2, max_replicas=4, scaling_timeout_s=0)


def run(
    chaos: Any, *faults: Fault, job: str = JOB, goal: JournalFlag | None = None, **plan: Any
) -> Outcome:
    """Run a job until ``goal`` is reached, if there is one."""
    options = plan.pop("options", {})
    if goal is not None:
        plan |= {"steps": 20, "until": goal.until, "watch": goal, "deadline_s": 150.0} | plan
    settings = {
        "nodes": 4,
        "spares": 0,
        "steps": 60,
        "elastic": POLICY,
        "options": {"step_s": 0.01} | options,
    } | plan
    return chaos.run(job, faults=faults, **settings)  # type: ignore[no-any-return]


def logs(outcome: Outcome) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each worker and the lines that it logged, in order."""
    for path in sorted((Path(outcome.directory) / "log").glob("node*.*.log")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        yield path.name.removesuffix(".log"), lines


def lines_about(outcome: Outcome, what: str) -> dict[str, list[dict[str, Any]]]:
    """Return worker -> its lines of kind ``what``; workers without such lines are left out."""
    lines_of = {
        worker: [line for line in lines if line["what"] == what] for worker, lines in logs(outcome)
    }
    return {worker: lines for worker, lines in lines_of.items() if lines}


def calls(outcome: Outcome, hook: str) -> list[Any]:
    """Return the journal records of the calls of a hook."""
    records = read_journals(Path(outcome.directory) / "journal")
    return [
        record for record in records if record.event == Event.HOOK_CALLED and record["hook"] == hook
    ]


def next_step(lines: list[dict[str, Any]], after: dict[str, Any]) -> dict[str, Any]:
    """Return the first step that the worker committed after the line ``after``.

    A transaction that was void commits none.
    """
    later = lines[lines.index(after) :]
    return next(line for line in later if line["what"] == "step" and line["at"] > after["step"])


def test_hooks_of_a_rank_that_leaves_show_a_phase_without_a_limit(tmp_path: Path) -> None:
    """The order to leave has a limit of its own."""
    board, shown = Board.create(), list[Phase]()
    callbacks = Callbacks(Journal(tmp_path, "node0.0"), board)
    callbacks.on_preempt += [lambda event: shown.append(board.phase)] * 2
    board.enter(Phase.LONG)
    callbacks.preempt(Dismissed(1.0, "the world is smaller"), step=5)
    assert shown == [Phase.UNTIMED] * 2


@pytest.mark.promise(
    "every rank of the new world, those that join included | before a step is committed in it"
)
def test_a_resize_is_told_on_every_rank_before_the_first_step_in_the_new_world(chaos: Any) -> None:
    """Ranks that stay and a rank that joins are told of the same steps."""
    goal = worlds_seen(chaos, 4, 2, 3)
    outcome = run(chaos, Scale(to=2, at_step=10), Scale(to=3, at_step=30), steps=40, goal=goal)
    resizes = lines_about(outcome, "on_resize")
    assert len(resizes) == 3  # two ranks that stayed, and the rank that joined
    for worker, lines in logs(outcome):
        for event in resizes.get(worker, ()):
            assert event["world"] == event["new_world"]
            assert "asked for" in event["reason"]
            first = next_step(lines, event)
            assert (first["world"], first["at"]) == (event["new_world"], event["step"] + 1)
    sizes = sorted(
        [(event["old_world"], event["new_world"]) for event in lines] for lines in resizes.values()
    )
    assert sizes == [[(2, 3)], [(4, 2), (2, 3)], [(4, 2), (2, 3)]]
    steps = {(event["new_world"], event["step"]) for lines in resizes.values() for event in lines}
    assert len(steps) == 2  # all are told of the same steps
    assert lines_about(outcome, "on_fault") == {}
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


@pytest.mark.promise("after its last step, once all others have formed their world without it")
def test_a_rank_that_leaves_is_told_how_long_it_has_and_no_rank_waits_for_it(chaos: Any) -> None:
    """The hook of a leaving rank waits until the others have taken a step without it."""
    outcome = run(
        chaos,
        Scale(to=3, at_step=10),
        goal=happened(chaos, Event.WORKER_EXITED),
        options={"awaits_world": 3},
    )
    ((worker, (event,)),) = lines_about(outcome, "on_preempt").items()
    assert event["seconds_left"] <= 600
    assert "asked for 3 nodes, so the world changes from 4 nodes to 3" in event["reason"]
    lines = dict(logs(outcome))[worker]
    order = [line["what"] for line in lines[-4:]]
    assert order == ["step", "on_preempt", "said goodbye", "left the function"]  # no step follows
    assert lines[-4]["at"] == event["step"]
    assert (Path(outcome.directory) / "disk" / worker.partition(".")[0] / "mine.pt").exists()
    (goodbye,) = lines_about(outcome, "said goodbye")[worker]
    assert goodbye["others_went_on"]
    (call,) = calls(outcome, "on_preempt")
    assert call["seconds"] > 0
    outcome.assert_same_losses_as_twin()


def test_a_notice_gives_the_rank_less_time_than_the_machine_has(chaos: Any) -> None:
    """The hook is over before the node is taken away."""
    outcome = run(
        chaos, TakeSpot(rank=2, at_step=10, grace_s=5.0), goal=happened(chaos, Event.NODE_LOST)
    )
    ((worker, (event,)),) = lines_about(outcome, "on_preempt").items()
    assert worker.startswith("node2.")
    assert event["seconds_left"] <= 4.0  # the last fifth is left for ending the worker
    assert "will be taken away" in event["reason"]
    assert len(lines_about(outcome, "said goodbye")) == 1
    assert outcome.lost_steps == 0


@dataclass(frozen=True, kw_only=True)
class Retire(TakeSpot):
    """A fault that sends SIGTERM to the agent of the rank's node, which asks for leave and ends by
    itself.
    """

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        agent, *_ = processes = look_up(target)
        agent.signal(signal.SIGTERM)  # the harness neither announces nor ends the node
        target.release()
        yield await all_gone(target, processes)


def test_an_agent_that_is_told_to_end_waits_for_the_hooks_of_its_rank(chaos: Any) -> None:
    """An agent that gets SIGTERM, as from a scheduler, waits for the hooks.

    The other ranks are told of the smaller world, and train meanwhile.
    """
    goal = happened(chaos, Event.NODE_LOST)
    outcome = run(chaos, Retire(rank=2, at_step=10), goal=goal, options={"awaits_world": 3})
    ((worker, (event,)),) = lines_about(outcome, "on_preempt").items()
    assert worker.startswith("node2.")
    assert "node2 will be taken away, so the world changes from 4 nodes to 3" in event["reason"]
    assert event["seconds_left"] <= 480  # 0.8 of gracefulShutdownTimeoutInSeconds
    (goodbye,) = lines_about(outcome, "said goodbye")[worker]
    assert goodbye["others_went_on"]
    resizes = lines_about(outcome, "on_resize")
    assert {other.partition(".")[0] for other in resizes} == {"node0", "node1", "node3"}
    assert {(e["old_world"], e["new_world"]) for lines in resizes.values() for e in lines} == {
        (4, 3)
    }
    records = list(read_journals(Path(outcome.directory) / "journal"))
    assert not [record for record in records if record.event == Event.DETECTED]
    (gone,) = [record for record in records if record.event == Event.NODE_LOST]
    (exit_,) = [r for r in records if r.event == Event.WORKER_EXITED and r["worker"] == worker]
    assert (exit_["how"], exit_["status"]) == ("exited", "status 0")
    assert exit_.t_ns < gone.t_ns
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_a_slow_rank_that_is_replaced_is_told_and_has_time(chaos: Any) -> None:
    fault = Straggle(rank=1, at_step=6, delay_ms=100.0, steps=1000)
    slow = {"slow_limit": 3.0, "slow_steps": 10, "balance": False, "spares": 1, "elastic": None}
    outcome = run(
        chaos,
        fault,
        goal=happened(chaos, Event.WORKER_EXITED),
        options={"takes_s": 0.3, "step_s": 0.02},
        **slow,
    )
    ((worker, (event,)),) = lines_about(outcome, "on_preempt").items()
    assert worker == "node1.0"
    assert event["seconds_left"] <= 30
    assert event["reason"]
    assert list(lines_about(outcome, "said goodbye")) == [worker]
    faults = lines_about(outcome, "on_fault")
    assert {other.partition(".")[0] for other in faults} == {"node0", "node2", "node3"}
    assert {line["cause"] for lines in faults.values() for line in lines} == {"slow"}
    outcome.assert_same_losses_as_twin()


def test_a_hook_that_takes_too_long_ends_with_its_process(chaos: Any) -> None:
    policy = ElasticPolicy(
        min_replicas=2, max_replicas=4, scaling_timeout_s=0, graceful_shutdown_timeout_s=1.0
    )
    goal = happened(chaos, Event.WORKER_EXITED)
    outcome = run(
        chaos, Scale(to=3, at_step=10), elastic=policy, goal=goal, options={"takes_s": 60.0}
    )
    assert len(lines_about(outcome, "on_preempt")) == 1
    assert lines_about(outcome, "said goodbye") == {}
    records = list(read_journals(Path(outcome.directory) / "journal"))
    (worker,) = lines_about(outcome, "on_preempt")
    (exit_,) = [r for r in records if r.event == Event.WORKER_EXITED and r["worker"] == worker]
    assert (exit_["how"], exit_["status"]) == ("killed", "SIGKILL")
    (ended,) = [r for r in records if r.event == Event.JOB_ENDED]
    assert exit_.t_ns < ended.t_ns
    outcome.assert_same_losses_as_twin()


@pytest.mark.promise(
    "the ranks that go on after a loss, once for each lost rank | with the next world, before `on_resize`"
)
def test_those_who_live_through_a_loss_are_told_of_it_and_then_of_the_smaller_world(
    chaos: Any,
) -> None:
    """The survivors are told of the fault, then of the smaller world; later, with the replacement,
    of the larger one.
    """
    outcome = run(chaos, Kill(rank=2, at_step=10), elastic=None, goal=worlds_seen(chaos, 3, 4))
    faults = lines_about(outcome, "on_fault")
    assert {worker.partition(".")[0] for worker in faults} == {"node0", "node1", "node3"}
    for worker, (event,) in faults.items():
        assert (event["lost"], event["world"]) == (2, 3)
        assert event["cause"] == "exited"
        assert event["detail"]
        lines = dict(logs(outcome))[worker]
        after = lines[lines.index(event) + 1]
        assert (after["what"], after["old_world"], after["new_world"]) == ("on_resize", 4, 3)
        assert next_step(lines, after)["world"] == 3
    grown = [
        line
        for lines in lines_about(outcome, "on_resize").values()
        for line in lines
        if line["new_world"] == 4
    ]
    assert len(grown) == 4
    assert {(line["old_world"], line["reason"]) for line in grown} == {(3, "a worker is ready")}


@pytest.mark.slow
@pytest.mark.promise("a spare that takes a lost rank's place is a fault and no resize")
def test_a_replacement_at_once_is_a_fault_and_no_resize(chaos: Any) -> None:
    outcome = run(chaos, Kill(rank=1, at_step=10), elastic=None, spares=1, until={"spares": 1})
    assert len(lines_about(outcome, "on_fault")) == 3
    assert lines_about(outcome, "on_resize") == {}


@pytest.mark.slow(hook="on_preempt")
@pytest.mark.promise(
    "is shown in the worker's log and written into the journal (`hook_called`, its `error`), and training goes on",
    hook="on_preempt",
)
@pytest.mark.parametrize("hook", ["on_resize", "on_preempt", "on_preempt!"])
def test_what_a_hook_raises_is_told_and_costs_no_training(chaos: Any, hook: str) -> None:
    outcome = run(
        chaos,
        Scale(to=3, at_step=10),
        goal=happened(chaos, Event.WORKER_EXITED),
        options={"fails": hook},
    )
    name = hook.removesuffix("!")
    errors = {call["error"] for call in calls(outcome, name)}
    assert len(calls(outcome, name)) == (3 if name == "on_resize" else 1)
    assert all(("the hook is wrong" in error) or ("mend it" in error) for error in errors)
    text = "".join(
        path.read_text() for path in (Path(outcome.directory) / "log").glob("node*.*.log")
    )
    assert f"a hook of {name} failed" in text
    outcome.assert_same_losses_as_twin()


def test_bad_input_in_a_hook_ends_the_run(chaos: Any) -> None:
    goal = happened(chaos, Event.WORKER_EXITED)
    with pytest.raises(BadInput, match="mend it"):
        run(chaos, Scale(to=3, at_step=10), goal=goal, options={"fails": "on_resize!"}, twin=False)


@pytest.mark.promise("A script that returns then ends the run, at that step on every rank")
def test_a_script_that_leaves_by_itself_does_so_at_the_same_step_everywhere(
    chaos: Any, tmp_path: Path
) -> None:
    """The script trains until the resize is asked for, however late, and the leaving rank has time
    to save.
    """
    outcome = chaos.harness.run(
        JOB,
        nodes=4,
        spares=0,
        steps=20,
        until={"file": str(tmp_path / "never made")},
        elastic=POLICY,
        options={"step_s": 0.01, "leaves": True, "last_saves_s": 1.0},
        deadline_s=120.0,
        faults=[Scale(to=3, at_step=10)],
        twin=False,
    )
    lasts = {worker: lines[-2] for worker, lines in logs(outcome)}
    assert len(lasts) == 4
    assert all(line["elastic"] for line in lasts.values())
    (step,) = {line["at"] for line in lasts.values()}
    assert 10 <= len(outcome.steps) == step  # after the request for the resize
    assert len(list((Path(outcome.directory) / "disk").glob("*/left.pt"))) == 4
    (ended,) = [
        r for r in read_journals(Path(outcome.directory) / "journal") if r.event == Event.JOB_ENDED
    ]
    assert ended["ok"]


# -- sharded jobs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "names its hooks again in each entry of the train function, and those of the entry before are dropped"
)
def test_a_sharded_job_names_its_hooks_again_in_every_entry_and_each_is_called_once(
    chaos: Any,
) -> None:
    """A loss is reported once to each rank that survives it."""
    job = f"{JOB}:train_sharded"
    plan: dict[str, Any] = {"job": job, "elastic": None, "spares": 2, "until": {"spares": 2}}
    outcome = run(chaos, Kill(rank=1, at_step=10), Kill(rank=2, at_step=20), **plan)
    losses = [
        (event["lost"], event["world"])
        for lines in lines_about(outcome, "on_fault").values()
        for event in lines
    ]
    assert sorted(losses) == [(1, 4)] * 3 + [(2, 4)] * 3
    assert lines_about(outcome, "on_resize") == {}


def test_a_sharded_job_that_shrinks_tells_who_goes_and_who_stays(chaos: Any) -> None:
    job = f"{JOB}:train_sharded"
    options = {"takes_s": 0.3}
    plan = {"job": job, "options": options, "max_lost_steps": 2, "shards": 4}
    outcome = run(
        chaos, Scale(to=2, at_step=10), goal=happened(chaos, Event.WORKER_EXITED, 2), **plan
    )
    assert len(lines_about(outcome, "on_preempt")) == 2
    assert len(lines_about(outcome, "said goodbye")) == 2
    resizes = lines_about(outcome, "on_resize")
    assert [
        [(line["old_world"], line["new_world"]) for line in lines] for lines in resizes.values()
    ] == [[(4, 2)]] * 2
    assert lines_about(outcome, "on_fault") == {}
