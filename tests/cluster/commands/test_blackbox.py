"""Commands as black boxes: started on every node, broken from outside, judged by their log, in real
processes.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.waiting import wait_until

from chaoskit.errors import BadInput, CommandFailed
from chaoskit.experiment.plan.command_plan import plan_command
from chaoskit.experiment.plan.planfile import save
from chaoskit.experiment.twin.twin import Interrupted
from chaoskit.journal import read_events
from chaoskit.pytest_plugin import Chaos
from chaoskit.report.html import write_html
from chaoskit.report.junit import write_junit
from chaoskit.report.statistics import estimate_recovery
from chaoskit.report.store import decode_outcome, encode_outcome
from chaoskit.report.summary import render_summary
from chaoskit.runlog.outcome import Check, Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.command import require_command
from chaoskit.stacks.course import went_back
from chaoskit.stacks.log import CommandLogLine
from chaoskit.vocabulary import Event, Verdict
from faults import (
    Cut,
    DiskFull,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    KillNode,
)

JOBS = Path(__file__).parents[2] / "jobs"
LOGGED = ["python", str(JOBS / "logs" / "logged.py")]
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
WAIT_S = 60.0
LONG = 160  # steps: most are left when a fault strikes, even if it strikes late
FROZEN_S = 2.5  # long enough for a late harness to notice the stop
START_S = 240.0  # a supervisor imports torch
LAUNCHED_S = 240.0  # torchrun and torch are imported first


def plain(steps: int = 20, step_s: float = 0.02, every: int = 0) -> list[str]:
    """Return the training command, which runs as rank n on node n."""
    return ["sh", "-c", f"RANK={{node_rank}} exec {' '.join(LOGGED)} {steps} {step_s} {every}"]


def torchrun(*options: str, job: str = "logs/logged.py", arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(JOBS / job), *arguments]


def run(chaos: Chaos, command: list[str], *faults: Fault, **plan: Any) -> Outcome:
    """Run a command; its journals must be complete, and its faults must strike as planned."""
    settings: dict[str, Any] = {"watch": WATCH, "check": False, "deadline_s": WAIT_S}
    outcome = chaos.run(command=command, faults=faults, **settings | plan)
    journals = check(outcome, "journals are whole")
    assert journals.verdict is Verdict.PASSED, journals.detail
    assert not [
        struck for struck in outcome.checks if struck.name.endswith("struck what was planned")
    ]
    return outcome


def check(outcome: Outcome, name: str) -> Check:
    return next(check for check in outcome.checks if check.name.startswith(name))


# -- one node, no launcher -------------------------------------------------------------------------


def test_an_unbroken_command_passes(chaos: Chaos) -> None:
    outcome = run(chaos, plain())
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert [point.step for point in outcome.steps] == list(range(20))
    assert check(outcome, "losses equal").detail == "20 of 20 losses, to the last digit"
    assert (outcome.stack, outcome.lost_steps, outcome.false_alarms, outcome.ledger) == (
        "command",
        0,
        None,
        None,
    )
    outcome.assert_same_losses_as_twin()


@pytest.mark.promise(
    "the command ended with status 0 on every node, in time, at the twin's last step"
)
def test_a_command_that_nobody_starts_again_has_failed(chaos: Chaos) -> None:
    """The log ends in the middle, and the evidence is the status that the parent saw."""
    outcome = run(chaos, plain(LONG), Kill(rank=0, at_step=5))
    assert outcome.verdict is Verdict.FAILED
    assert (
        check(outcome, "training completed").detail == "the command on node0 was killed by SIGKILL"
    )
    assert re.fullmatch(r"pid \d+ was killed by SIGKILL", check(outcome, "evidence of Kill").detail)
    (fault,) = outcome.faults
    assert fault.moment == "as soon as the log showed step 5"
    assert "its phase is not known" in fault.evidence[0].observed
    assert outcome.steps[-1].step < LONG - 1


def test_a_process_that_its_parent_forgets_at_once_is_known_to_be_gone(chaos: Chaos) -> None:
    """A command that ends with status 0 before the last step of the unbroken run has not completed
    its training.
    """
    command = ["sh", "-c", f"RANK=0 {' '.join(LOGGED)} {LONG} 0.02 0; exit 0"]
    outcome = run(chaos, command, Kill(rank=0, after_s=0.1))
    assert re.search(
        r"pid \d+ (is gone|was killed by SIGKILL)", check(outcome, "evidence of Kill").detail
    )
    assert re.search(
        rf"the log ends with step \d+, the unbroken run's with step {LONG - 1}",
        " ".join(outcome.reasons),
    )


@pytest.mark.promise("at most `max_lost_steps` steps were shown again")
def test_steps_that_are_shown_again_are_lost(chaos: Chaos, tmp_path: Path) -> None:
    """A shell starts its training again from a checkpoint of every fifth step: the steps since then
    are lost.
    """
    command = ["sh", "-c", f"until RANK=0 {' '.join(LOGGED)} {LONG} 0.02 5; do :; done"]
    outcome = run(chaos, command, Kill(rank=0, at_step=8))
    assert check(outcome, "committed steps kept").verdict is Verdict.FAILED
    log = (Path(outcome.directory) / "log" / "node0.log").read_text()
    shown = [int(step) for step in re.findall(r"step (\d+)", log)]
    ((before, after),) = [
        (step, following) for step, following in pairwise(shown) if following <= step
    ]
    assert after % 5 == 0
    assert outcome.lost_steps == before + 1 - after > 0
    assert outcome.recovery.seconds > 0
    assert "went back from step" in outcome.recovery.cause
    outcome.assert_same_losses_as_twin()
    allowed = run(chaos, command, Kill(rank=0, at_step=8), max_lost_steps=LONG)
    assert allowed.verdict is Verdict.PASSED, allowed.reasons
    reports_tell(outcome, tmp_path)


def reports_tell(outcome: Outcome, directory: Path) -> None:
    """Assert that reports show the available facts, and nothing else."""
    assert decode_outcome(encode_outcome(outcome)) == outcome
    write_html([outcome], directory / "report.html")
    page = (directory / "report.html").read_text()
    assert "went back from step" in page
    assert all(
        word not in page
        for word in ("Ledger", "false alarms", "world size", "0 ranks", "batch skipped")
    )
    write_junit([outcome], directory / "junit.xml")
    report = (directory / "junit.xml").read_text()
    assert "chaoskit.recovery_s" in report
    assert "chaoskit.false_alarms" not in report
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_summary([outcome]))
    text = console.export_text()
    assert "went back from step" in text
    assert "full strength" not in text
    assert estimate_recovery([outcome]).total.runs == 1


def test_a_rank_that_stands_still_is_continued_in_the_end(chaos: Chaos) -> None:
    outcome = run(chaos, plain(LONG), Hang(rank=0, at_step=5), stalled_s=FROZEN_S, twin=False)
    assert check(outcome, "evidence of Hang").verdict is Verdict.PASSED
    assert "no step was shown for 2.5 s (stalled_s)" in check(outcome, "training completed").detail
    assert check(outcome, "recovered").verdict is Verdict.FAILED


def test_a_command_that_never_stops_talking_is_ended_in_time(chaos: Chaos) -> None:
    """Endless output does not keep the harness from checking the deadline."""
    outcome = run(chaos, ["sh", "-c", "echo step 1; yes"], twin=False, deadline_s=1.0)
    assert "deadline of 1 s" in check(outcome, "training completed").detail


@pytest.mark.promise("none has: with the pattern, and a line that it does not match")
def test_a_pattern_that_matches_nothing_proves_nothing(chaos: Chaos) -> None:
    watch = LogPatterns(step=r"iteration (\d+)", loss=r"loss ([\d.]+)")
    outcome = run(chaos, plain(10), Kill(rank=0, at_step=3), watch=watch)
    assert outcome.verdict is Verdict.UNKNOWN
    detail = check(outcome, "the log shows steps").detail
    assert (
        r"LogPatterns(step='iteration (\\d+)') matches none of 10 lines, such as '[rank0] step 0"
        in detail
    )
    assert "correct the pattern" in detail
    assert "the log shows no step" in check(outcome, "evidence of Kill").detail
    assert check(outcome, "losses equal").verdict is Verdict.UNKNOWN


def test_losses_without_a_match_are_unknown_and_without_a_pattern_not_asked_for(
    chaos: Chaos,
) -> None:
    outcome = run(chaos, plain(10), watch=LogPatterns(step=r"step (\d+)", loss=r"cost ([\d.]+)"))
    assert outcome.verdict is Verdict.UNKNOWN
    assert "cost" in check(outcome, "losses equal").detail
    silent = run(chaos, plain(10), watch=LogPatterns(step=r"step (\d+)"))
    assert silent.verdict is Verdict.PASSED, silent.reasons
    assert not any(check.name.startswith("losses") for check in silent.checks)


@pytest.mark.promise("equal to the last digit that was printed")
@pytest.mark.promise("by how much a loss may differ from the twin's, relative to that")
def test_losses_that_differ_are_told_and_a_tolerance_forgives_them(
    chaos: Chaos, tmp_path: Path
) -> None:
    counter = tmp_path / "runs"  # a number that differs in each run
    count = f"n=$(cat {counter} 2>/dev/null || echo 0); echo $((n + 1)) > {counter}; echo step 0 loss 1.$n"
    outcome = run(chaos, ["sh", "-c", count])
    assert outcome.verdict is Verdict.FAILED
    assert check(outcome, "losses equal").detail == "step 0: 1.1 instead of 1.0"
    close = run(
        chaos,
        ["sh", "-c", f"{count} "],
        watch=LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)", tolerance=0.2),
    )
    assert close.verdict is Verdict.PASSED, close.reasons


COUNTED = """
import sys
from pathlib import Path

counter, how = Path({counter!r}), sys.argv[1]
number = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(number + 1))
again = how == "always" or (how == "first" and number == 0)
steps = [*range(30), *(range(20, 40) if again else range(30, 40))]
for step in steps:
    quiet = number > 0 and (how == "silent" and step > 0 or how == "one" and step == 7)
    print("step", step, *(() if quiet else ("loss", round(1 / (step + 1), 6))), flush=True)
"""


def counted(directory: Path, how: str) -> list[str]:
    """Return a script that counts its runs, and behaves differently in its first or in its later
    runs.

    The script contains the path of the counter: an argument would name a file of the run alone on
    nodes that have copies.
    """
    script = directory / "counted.py"
    script.write_text(COUNTED.format(counter=str(directory / "runs")))
    return [sys.executable, str(script), how]


def test_losses_that_one_step_of_many_shows_prove_nothing(chaos: Chaos, tmp_path: Path) -> None:
    """The unbroken run shows all losses, and the other one that of its first step."""
    outcome = run(chaos, counted(tmp_path, "silent"))
    compared = check(outcome, "losses equal")
    assert compared.verdict is Verdict.UNKNOWN
    assert compared.detail == "39 of 40 steps have a loss in the twin's log, but not in this run's"


def test_a_loss_that_is_missing_now_and_then_is_told(chaos: Chaos, tmp_path: Path) -> None:
    outcome = run(chaos, counted(tmp_path, "one"))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert check(outcome, "losses equal").detail == "39 of 40 losses, to the last digit"


def test_an_unbroken_run_that_began_again_by_itself_is_run_once_more(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A twin that repeats ten steps is run again, because lost steps would not show in a comparison
    with it.
    """
    outcome = run(chaos, counted(tmp_path, "first"))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert (tmp_path / "runs").read_text() == "3"


def test_a_command_that_always_begins_again_has_no_unbroken_run(
    chaos: Chaos, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted, match="its log on node0 goes back from step 29 to step 20"):
        run(chaos, counted(tmp_path, "always"))


@pytest.mark.parametrize(
    ("steps", "back"),
    [
        ([0, 1, 2, 3], None),
        ([0, 0, 1, 1, 2, 2], None),
        ([0, 1, 0, 1, 2, 2], None),  # two ranks, one of them late
        ([0, 1, 1, 2, 3, 3], None),  # another line shows every second step
        ([0, 1, 2, 1, 2, 3], (2, 1)),
        ([0, 0, 1, 1, 2, 0, 0, 1, 1, 2, 2, 3, 3], (2, 0)),
    ],
)
def test_a_log_goes_back_where_steps_are_computed_again(
    steps: list[int], back: tuple[int, int] | None
) -> None:
    lines = [
        CommandLogLine(number, node, step, None)
        for node in ("node0", "node1")
        for number, step in enumerate(steps)
    ]
    assert went_back(lines) == (back and ("node0", *back))


def test_a_command_that_fails_unbroken_is_no_verdict_on_recovery(chaos: Chaos) -> None:
    with pytest.raises(
        CommandFailed, match="did not complete: the command on node0 ended with status 3"
    ):
        run(chaos, ["sh", "-c", "exit 3"])


@pytest.mark.promise(
    "Kept elsewhere, the broken run would begin where its twin has ended; chaoskit sees that in the log, "
    "and says `unknown`."
)
def test_what_keeps_its_state_elsewhere_is_told_to_keep_it_in_the_directory_of_the_run(
    chaos: Chaos, tmp_path: Path
) -> None:
    command = ["sh", "-c", f"CHAOSKIT_RUN_DIR={tmp_path} exec {' '.join(LOGGED)} 10 0.01 5"]
    outcome = run(chaos, command)
    assert outcome.verdict is Verdict.UNKNOWN
    assert (
        "the log begins with step 5, the unbroken run's with step 0"
        in check(outcome, "losses equal").detail
    )


# -- several nodes ---------------------------------------------------------------------------------


@pytest.mark.promise(
    "It is started once on each of the `nodes` (1 by default), in a session of its own"
)
def test_every_node_is_told_its_place(chaos: Chaos, tmp_path: Path) -> None:
    shown = (
        "echo step 0; echo {node_rank} {nodes} {address} {master_addr} {master_port} {seed} {other}"
    )
    variables = "echo $NODE_RANK $NNODES $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS; pwd; cut -d' ' -f1,6 /proc/$$/stat"
    outcome = run(
        chaos,
        ["sh", "-c", f"{shown}; {variables}"],
        nodes=2,
        seed=7,
        twin=False,
        working_directory=tmp_path,
    )
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    # a node that does not see this host's files has a copy of the directory
    (paths, _) = (record["paths"] for record in outcome.records(Event.COMMAND_STARTED))
    masters, addresses = set[str](), list[str]()
    for number in range(2):
        _, first, second, third, fourth = (
            (Path(outcome.directory) / "log" / f"node{number}.log").read_text().splitlines()
        )
        rank, nodes, address, master, port, seed, other = first.split()
        assert (rank, nodes, seed, other) == (str(number), "2", "7", "{other}")
        masters.add(master)
        addresses.append(address)
        assert second.split() == [str(number), "2", master, port, "1"]
        assert int(port) > 0
        assert third == paths.get(str(tmp_path), str(tmp_path))
        pid, session = fourth.split()
        assert session == pid, "it is in the session of another process"
    assert masters == {addresses[0]}


@pytest.mark.promise(
    "Nodes that `KillNode` or `Preempt` took away do not count, as long as one is left"
)
def test_a_node_that_is_taken_away_need_not_end_well(chaos: Chaos) -> None:
    outcome = run(chaos, plain(LONG), KillNode(rank=1, at_step=5), nodes=2)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert (
        check(outcome, "training completed").detail
        == "the command ended with status 0 on 1 of 2 nodes"
    )
    assert check(outcome, "evidence of KillNode").verdict is Verdict.PASSED


def test_a_frozen_node_goes_on_later(chaos: Chaos) -> None:
    outcome = run(chaos, plain(LONG), FreezeNode(rank=0, at_step=3, thaw_after_s=FROZEN_S))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert outcome.recovery.seconds >= 0.8 * FROZEN_S
    assert "no new step was shown for" in outcome.recovery.cause


@pytest.mark.promise(
    "a directory of this run and node alone, which faults of disks trouble unless they name another one"
)
@pytest.mark.not_in_pods("a directory of a pod cannot be put on a disk of its own without rights")
def test_a_full_disk_ends_a_command_that_does_not_bear_it(chaos: Chaos) -> None:
    fault = DiskFull(rank=0, at_step=5)
    if reason := fault.unavailable():
        pytest.skip(reason)
    command = ["sh", "-c", f"CHAOSKIT_RUN_DIR={{disk}} RANK=0 exec {' '.join(LOGGED)} 1000 0.02 2"]
    outcome = run(chaos, command, fault, twin=False)
    assert re.search(
        r"has refused [1-9]\d* writes with ENOSPC", check(outcome, "evidence of DiskFull").detail
    )
    assert check(outcome, "training completed").detail == "the command on node0 ended with status 1"


# -- torchrun --------------------------------------------------------------------------------------


def test_torchrun_without_restarts_fails(chaos: Chaos) -> None:
    command = torchrun(
        "--standalone", "--nproc-per-node=2", "--max-restarts=0", arguments=(str(LONG), "0.05", "5")
    )
    outcome = run(
        chaos, command, Kill(rank=1, at_step=8), twin=False, ranks=2, deadline_s=LAUNCHED_S
    )
    assert outcome.verdict is Verdict.FAILED
    assert check(outcome, "training completed").detail == "the command on node0 ended with status 1"
    assert "failed (exitcode: -9) local_rank: 1" in outcome.log_ends[0].error
    assert re.search(
        r"pid \d+ (was killed by SIGKILL|is gone)", check(outcome, "evidence of Kill").detail
    )


@pytest.mark.slow
@pytest.mark.promise("torchrun comes back, and repeats what it had done since the last one")
def test_torchrun_with_restarts_comes_back_and_repeats_steps(chaos: Chaos) -> None:
    command = torchrun(
        "--standalone", "--nproc-per-node=2", "--max-restarts=2", arguments=("100", "0.05", "20")
    )
    outcome = run(
        chaos, command, Kill(rank=1, at_step=24), max_lost_steps=40, ranks=2, deadline_s=LAUNCHED_S
    )
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert outcome.lost_steps > 0
    assert outcome.recovery.seconds > 0.05
    outcome.assert_same_losses_as_twin()


@pytest.mark.chaos(substrate="netns")
def test_torchrun_on_two_networks_waits_out_a_cut(chaos: Chaos) -> None:
    fault = Cut(rank=1, at_step=5, heal_after_s=0.8)
    if reason := fault.unavailable():
        pytest.skip(reason)
    nodes = (
        "--nnodes={nodes}",
        "--node-rank={node_rank}",
        "--master-addr={master_addr}",
        "--master-port={master_port}",
    )
    command = torchrun(
        *nodes, "--nproc-per-node=1", job="training/averaged.py", arguments=(str(LONG), "0.02")
    )
    outcome = run(chaos, command, fault, nodes=2, twin=False, deadline_s=LAUNCHED_S)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert re.search(
        r"the kernel has counted [1-9]\d* packets", check(outcome, "evidence of Cut").detail
    )
    assert outcome.recovery.seconds >= 0.7


# -- as files --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise("`chaoskit replay` runs it again, in the same working directory")
@pytest.mark.costly
def test_a_plan_of_a_command_is_replayed(tmp_path: Path, substrate: str) -> None:
    """A plan is replayed by the command line, from another directory, with progress lines.

    The command names its script by a path that exists only in the working directory of the plan.
    """
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for directory in (work, elsewhere):
        directory.mkdir()
    shutil.copy(JOBS / "logs" / "logged.py", work / "mine.py")
    command = [
        "sh",
        "-c",
        f"pwd >> {tmp_path}/pwd; RANK={{node_rank}} exec python mine.py {LONG} 0.02 0",
    ]
    experiment = plan_command(
        command, watch=WATCH, faults=[Kill(rank=0, at_step=3)], name="mine", working_directory=work
    )
    save(experiment, tmp_path / "plan.json")
    replay = [
        sys.executable,
        "-m",
        "chaoskit",
        "replay",
        str(tmp_path / "plan.json"),
        "--no-twin",
        "--json",
        f"--substrate={substrate}",
    ]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [*replay, "--report", str(tmp_path / "report")],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == Verdict.FAILED.exit_code, done.stderr
    (outcome,) = json.loads(done.stdout)["outcomes"]
    (started,) = read_events(Path(outcome["directory"]) / "journal", Event.COMMAND_STARTED)
    place = str(work.resolve())  # a node that does not see this host's files has a copy of it
    assert (tmp_path / "pwd").read_text() == f"{started['paths'].get(place, place)}\n"
    assert outcome["faults"][0]["state"] == "confirmed"
    assert "Kill(rank=0, at_step=3) strikes" in done.stderr


# -- nothing is left -------------------------------------------------------------------------------

HARNESS = """
import sys
from pathlib import Path
from chaoskit.experiment.harness import Harness
from chaoskit.stacks import LogPatterns

harness = Harness(sys.argv[3], Path(sys.argv[1]))
harness.run(command=["sh", "-c", sys.argv[2]], watch=LogPatterns(step="step ([0-9]+)"), twin=False, nodes=2)
"""


@pytest.mark.slow
@pytest.mark.promise("all of that ends with the command, and with the test")
@pytest.mark.costly
def test_a_harness_that_is_killed_leaves_no_process(tmp_path: Path, substrate: str) -> None:
    """Processes in a session of their own end with the harness, too.

    All processes of the command have inherited a lock, which is held as long as one of them lives.
    """
    started, lock = tmp_path / "started", tmp_path / "lock"
    script = (
        f"exec 9>>{lock}; flock --shared 9; "
        f"setsid sh -c 'sleep 600 & echo $! $$ >> {started}; wait' & echo $$ $! >> {started}; "
        "echo step 1; wait"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(tmp_path / "run"), script, substrate], env=environment
    )
    try:
        wait_until(
            lambda: started.exists() and len(started.read_text().split()) == 8,
            "the command has started",
            limit_s=START_S,
        )
        assert not is_free(lock)
    finally:
        harness.kill()
        harness.wait()
    wait_until(lambda: is_free(lock), "the end of all that the command started")


def is_free(lock: Path) -> bool:
    """Return whether no process holds a lock of this file."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_what_a_command_leaves_behind_ends_with_it(chaos: Chaos, tmp_path: Path) -> None:
    lock = tmp_path / "lock"  # held as long as the process that is left behind lives
    left_behind = f"setsid flock {lock} sleep 600 & until test -e {lock}; do sleep 0.01; done"
    outcome = run(chaos, ["sh", "-c", f"echo step 0; {left_behind}"], twin=False)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert is_free(lock)


# -- ranks found by nodes --------------------------------------------------------------------------


def test_a_node_tells_which_process_has_which_rank(chaos: Chaos) -> None:
    """A node reports the processes of two attempts of two ranks, and none that a rank has started.

    The harness does not take part.
    """
    script = "for n in 1 2; do for r in 0 1; do RANK=$r sh -c 'sleep 3 & wait' & done; wait; done; echo step 0"
    outcome = run(chaos, ["sh", "-c", script], twin=False)
    (started,) = outcome.records(Event.COMMAND_STARTED)
    records = outcome.records(Event.RANK_FOUND)
    assert [record["rank"] for record in records] in (
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [1, 0, 0, 1],
        [1, 0, 1, 0],
    )
    assert len({record["pid"] for record in records} - {started["pid"]}) == 4
    assert {record.source for record in records} == {"node0"}
    gone = outcome.records(Event.RANK_GONE)
    assert {(record["rank"], record["pid"], record["ticks"]) for record in gone} == {
        (record["rank"], record["pid"], record["ticks"]) for record in records
    }
    assert max(record.t_ns for record in gone[:2]) <= min(record.t_ns for record in records[2:])


def test_a_process_is_known_to_its_node_before_it_is_struck(chaos: Chaos) -> None:
    """The node is asked to look for a rank that has shown its first step at once."""
    outcome = run(chaos, plain(LONG), Kill(rank=0, at_step=0), twin=False)
    (injected,), (seat,), (gone,) = (
        outcome.records(event) for event in (Event.INJECTED, Event.RANK_FOUND, Event.RANK_GONE)
    )
    assert (injected["rank"], injected["pid"], injected["node"]) == (
        seat["rank"],
        seat["pid"],
        seat.source,
    )
    assert seat.t_ns <= injected.t_ns <= gone.t_ns


def test_code_behind_c_may_have_braces_of_its_own() -> None:
    command = ("bash", "-c", "echo {Seed}")
    assert require_command(command) == command
    with pytest.raises(BadInput, match=r"write \{seed\}"):
        require_command(["train.sh", "{Seed}"])
