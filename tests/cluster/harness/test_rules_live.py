"""Log rules on real runs: a rank that goes quiet, slow or NaN is replaced, and no other rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat, Welcome, WorkerLost
from faults import BadBatch, Hang, Kill, Straggle

JOB = "../../jobs/logs/printing.py"
#: Limits that turn all other detectors off.
BLIND: dict[str, Any] = {
    "hang_steps": 1e6,
    "hang_floor_ms": 10_000_000,
    "collective_timeout_s": 20_000.0,
}
#: Far above the time that a rank may wait for a CPU on a busy machine.
#: Short limits are tested on a clock of their own, in test_logwatch.
OFTEN_S = 10.0
SLOW_MS, STRAGGLE_MS = 1000.0, 2000.0
LINE = r"step \d+ loss (\S+) took (?:\S+) ms"
QUIET = {"name": "quiet", "logPattern": LINE, "expectedRecurringFrequencyInSeconds": OFTEN_S}
ALERT = {"action": "alert"}
SLOW = {
    "name": "slow",
    "logPattern": r"step \d+ loss \S+ took (\S+) ms",
    "metricThreshold": SLOW_MS,
    "operator": "gt",
    "metricEvaluationDataPoints": 3,
}
#: A rule that fires at the first line of each rank: evidence that rules are evaluated.
SEEN = SLOW | ALERT | {"name": "seen", "metricThreshold": 0, "metricEvaluationDataPoints": 1}


def run(chaos: Chaos, *rules: dict[str, Any], **plan: Any) -> Outcome:
    return chaos.run(
        JOB,
        rules=list(rules),
        **({"nodes": 3, "spares": 1, "steps": 40, "deadline_s": 300.0} | plan),
    )


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def lost(outcome: Outcome) -> list[tuple[int, str]]:
    return [(record["rank"], record["cause"]) for record in journal(outcome, Event.DETECTED)]


def fired(outcome: Outcome) -> list[tuple[str, str, int]]:
    return [
        (record["rule"], record["verdict"], record["rank"])
        for record in journal(outcome, Event.RULE_FIRED)
    ]


@pytest.mark.promise(
    "the worker is given up with the cause `log rule`, and replaced as any other lost rank"
)
def test_a_rank_that_goes_quiet_is_replaced_in_time(chaos: Chaos) -> None:
    """A rank that hangs is given up, and none of the others, which are as quiet because they wait
    for it.
    """
    outcome = run(chaos, QUIET, faults=[Hang(rank=1, at_step=8, how="spin")], **BLIND)
    assert lost(outcome) == [(1, "log rule")]
    assert fired(outcome) == [("quiet", "hanging", 1)]
    (record,) = journal(outcome, Event.RULE_FIRED)
    assert (record["limit"], record["reason"], record["action"]) == (
        OFTEN_S,
        "no match for 10 s",
        "restart-process",
    )
    (recovery,) = outcome.recoveries
    assert recovery.spans[0].seconds > OFTEN_S * 0.8
    assert "quiet: hanging, no match for 10 s" in recovery.cause
    outcome.assert_same_losses_as_twin()


def test_a_slow_rank_is_replaced(chaos: Chaos) -> None:
    """A rank is replaced after three printed times above the limit in a row."""
    fault = Straggle(rank=2, at_step=8, delay_ms=STRAGGLE_MS, steps=30)
    outcome = run(chaos, SLOW, faults=[fault], **BLIND)
    assert lost(outcome) == [(2, "log rule")]
    assert fired(outcome) == [("slow", "slow", 2)]
    assert str(outcome.rules_fired[0]).startswith("slow, rank 2: slow, ")
    assert str(outcome.rules_fired[0]).endswith(" > 1000, 3 times in a row -> restart-process")
    (record,) = journal(outcome, Event.RULE_FIRED)
    assert float(record["value"]) > record["limit"] == SLOW_MS
    assert record["line"].startswith("step 10 loss "), "three in a row, from step 8 on"


@pytest.mark.slow
@pytest.mark.promise(
    "the journal (`rule_fired`), live views and the outcome (`outcome.rules_fired`) tell of it"
)
def test_an_alert_is_told_and_nothing_is_done(chaos: Chaos) -> None:
    """The action ``alert`` records that the rule fired, and replaces no rank."""
    fault = Straggle(rank=2, at_step=8, delay_ms=STRAGGLE_MS, steps=4)
    outcome = run(chaos, SLOW | {"action": "alert"}, faults=[fault], spares=0, steps=20, **BLIND)
    assert lost(outcome) == []
    assert fired(outcome) == [("slow", "slow", 2)]


def test_a_bad_batch_that_is_printed_is_no_false_alarm(chaos: Chaos) -> None:
    """A printed NaN that a planned fault has made is explained by it."""
    outcome = run(chaos, QUIET, faults=[BadBatch(at_step=8)], twin=False)
    (rank, cause), *others = lost(outcome)
    assert (cause, others) == ("log rule", [])
    assert fired(outcome)[0] == ("quiet", "not-a-number", rank)
    assert {record["since_step"] for record in journal(outcome, Event.RULE_FIRED)} <= {7, 8}


@pytest.mark.slow
@pytest.mark.promise("the next one ends the job and says so")
def test_without_a_fault_a_rule_that_fires_is_a_false_alarm(chaos: Chaos) -> None:
    """If all ranks print NaN, each generation has one restart, and the job ends when restarts do
    not help.
    """
    outcome = run(
        chaos, QUIET, nodes=2, options={"nan_from": 8}, check=False, steps=1000, twin=False
    )
    assert outcome.verdict == Verdict.FAILED
    assert outcome.reasons[0].startswith(
        "training completed: log rule quiet: the metric is 'nan', again after 2 "
    )
    plans = [record["generation"] for record in journal(outcome, Event.PLAN)]
    assert {cause for _, cause in lost(outcome)} == {"log rule"}
    assert len(lost(outcome)) == outcome.false_alarms == 2
    assert max(plans) <= 2 * 2 + 1, "not more than one loss and one return for each restart"
    excused = journal(outcome, Event.RULE_EXCUSED)
    assert excused
    assert {record["rule"] for record in excused} == {"quiet"}


@pytest.mark.promise("the next one counts restarts in a row on")
def test_restarts_are_counted_though_the_coordinator_is_killed_after_each(chaos: Chaos) -> None:
    """The count of restarts is in the coordinator's log; otherwise the next one would restart ranks
    for ever.
    """
    coordinator, killed_for = 0, set[str]()

    def watch(message: Any) -> None:
        nonlocal coordinator
        if isinstance(message, Welcome):
            coordinator = message.pid
        is_repeated = (
            not isinstance(message, WorkerLost) or message.worker in killed_for
        )  # the next coordinator reports it again
        if coordinator and not is_repeated and len(killed_for) < 2:
            os.kill(coordinator, signal.SIGKILL)
            coordinator = 0
            killed_for.add(message.worker)

    settings = {"options": {"nan_from": 8}, "check": False, "steps": 1000, "twin": False}
    outcome = run(chaos, QUIET, nodes=2, watch=watch, **settings)
    assert outcome.reasons[0].startswith(
        "training completed: log rule quiet: the metric is 'nan', again after 2 "
    )
    assert {record["worker"] for record in journal(outcome, Event.DETECTED)} == killed_for
    assert [record["term"] for record in journal(outcome, Event.RESUMED)] == [2, 3]


@pytest.mark.slow
@pytest.mark.promise("`stopPattern` ends the watch of that worker for good.")
def test_a_line_can_end_the_watch(chaos: Chaos) -> None:
    """A rule stops watching a rank after a line with the stop pattern."""
    stops = SLOW | {"stopPattern": "the last lines"}
    fault = Straggle(rank=2, at_step=12, delay_ms=STRAGGLE_MS, steps=4)
    outcome = run(chaos, stops, faults=[fault], options={"stop_at": 6}, spares=0, steps=20, **BLIND)
    assert lost(outcome) == []
    assert sorted(fired(outcome)) == [("slow", "stopped", rank) for rank in range(3)]


def test_recoveries_of_others_are_no_false_alarms(chaos: Chaos) -> None:
    """A rank that waits for the recovery of another is not called hanging, while rules are
    evaluated.
    """
    rules = [QUIET | {"expectedStartCutOffInSeconds": OFTEN_S}, SEEN]
    faults, goal = (
        [Kill(rank=1, at_step=8), Kill(rank=0, at_step=20)],
        happened(chaos, Event.RULE_FIRED),
    )
    outcome = run(chaos, *rules, faults=faults, spares=0, until=goal.until, watch=goal)
    assert {cause for _, cause in lost(outcome)} == {"exited"}
    assert {rule for rule, _, _ in fired(outcome)} == {"seen"}


@pytest.mark.slow
@pytest.mark.promise("is not called hanging while another rank prints it: often only rank 0 does")
def test_a_rank_that_never_prints_is_excused_while_another_one_prints(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A rank that never prints is not called hanging while another one prints; the printing rank
    is, when it is silent.
    """
    before, excused = set(chaos.harness.directory.iterdir()), tmp_path / "excused"

    def watch(message: Any) -> None:
        if isinstance(message, Heartbeat) and not excused.exists():
            (directory,) = set(chaos.harness.directory.iterdir()) - before
            if silent_and_excused(directory / "journal") == {"node1.0", "node2.0"}:
                excused.touch()

    start = QUIET | {"expectedStartCutOffInSeconds": 5}
    fault = Hang(rank=0, at_step=10, how="spin")
    options = {"printers": [0], "hold_at": 5, "file": str(excused)}
    outcome = run(
        chaos, start, steps=20, options=options, faults=[fault], watch=watch, twin=False, **BLIND
    )
    assert lost(outcome) == [(0, "log rule")]
    assert silent_and_excused(Path(outcome.directory) / "journal") == {"node1.0", "node2.0"}
    first = journal(outcome, Event.PLAN)[0]["members"][0]["worker"]  # two workers start on its node
    assert f"{first} prints" in journal(outcome, Event.RULE_EXCUSED)[0]["detail"]


def silent_and_excused(directory: Path) -> set[str]:
    """Return workers for which a rule asked for an act that was not done."""
    return {
        record["worker"]
        for record in read_journals(directory)
        if record.event == Event.RULE_EXCUSED
    }


@pytest.mark.slow
@pytest.mark.promise(
    "so are all workers of its node, which gets no more of them as long as there is another node"
)
def test_a_node_can_be_replaced(chaos: Chaos) -> None:
    """The action ``replace-node`` sets the node of the rank aside, with its spare."""
    fault = Hang(rank=0, at_step=8, how="spin")
    outcome = run(chaos, QUIET | {"action": "replace-node"}, faults=[fault], check=False, **BLIND)
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] in ([], ["no false alarm"]), problems
    assert [record["node"] for record in journal(outcome, Event.SET_ASIDE)] == ["node0"]
    started = {record["worker"] for record in journal(outcome, Event.WORKER_STARTED)}
    assert {name for name in started if name.startswith("node0.")} == {"node0.0", "node0.1"}
    assert {member["node"] for member in journal(outcome, Event.PLAN)[-1]["members"]} == {
        "node1",
        "node2",
    }
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize("action", ["restart-process", "alert"])
def test_an_unbroken_run_hears_nothing_of_its_rules(chaos: Chaos, action: str) -> None:
    """Rules that are evaluated fire on no healthy rank."""
    rules = [
        QUIET | {"action": action, "expectedStartCutOffInSeconds": OFTEN_S},
        SLOW | {"action": action},
        SEEN,
    ]
    goal = happened(chaos, Event.RULE_FIRED)
    outcome = run(chaos, *rules, steps=20, spares=0, until=goal.until, watch=goal)
    assert ({rule for rule, _, _ in fired(outcome)}, lost(outcome)) == ({"seen"}, [])


# -- commands, and sources of rules ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise("every action counts as `alert`")
def test_the_rules_of_a_command_are_told_of(chaos: Chaos) -> None:
    """Rules on the log of a command are reported; its launcher is under test, so no action is
    taken.
    """
    script = (
        "for i in 1 2 3 4; do echo step $i loss $i; sleep 0.1; done; sleep 8; echo step 5 loss nan"
    )
    rules = [
        {
            "name": "loss",
            "logPattern": r"step \d+ loss (\S+)",
            "expectedRecurringFrequencyInSeconds": 4,
        }
    ]
    watch = LogPatterns(step=r"step (\d+)")
    outcome = chaos.run(
        command=["sh", "-c", script], watch=watch, rules=rules, twin=False, deadline_s=300.0
    )
    reports = [(rule.verdict, rule.where, rule.step, rule.action) for rule in outcome.rules_fired]
    assert reports == [("hanging", "node0", 4, "alert"), ("not-a-number", "node0", 4, "alert")]


@pytest.mark.promise(
    "What cannot be right is refused with the rule's name and the field", command=None
)
@pytest.mark.parametrize("command", [None, ["true"]])
def test_rules_that_cannot_work_are_refused_before_the_start(
    chaos: Chaos, command: list[str] | None
) -> None:
    """A rule with a broken pattern is refused before anything starts."""
    bad = [{"name": "a", "logPattern": "(", "expectedRecurringFrequencyInSeconds": 1}]
    started: dict[str, Any] = (
        {"job": JOB, "steps": 1}
        if command is None
        else {"command": command, "watch": LogPatterns(step=r"(\d+)")}
    )
    with pytest.raises(BadInput, match="correct the regular expression"):
        chaos.run(**started, rules=bad)


@pytest.mark.costly
def test_a_launch_tells_what_fires(tmp_path: Path) -> None:
    rules = [
        SLOW | ALERT | {"metricThreshold": 1},
        QUIET | {"expectedRecurringFrequencyInSeconds": 90},
    ]
    (tmp_path / "job.yaml").write_text(f"spec:\n  logMonitoringConfiguration: {json.dumps(rules)}")
    script = Path(__file__).parent / JOB
    command = [
        sys.executable,
        "-m",
        "chaoskit",
        "launch",
        str(script),
        "--set",
        "steps=6",
        "--nodes",
        "2",
    ]
    options = ["--rules", str(tmp_path / "job.yaml"), "--report", str(tmp_path / "run"), "--json"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 6
    assert "log rule slow, rank 0: slow, " in done.stderr
