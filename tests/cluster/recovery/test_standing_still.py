"""Jobs recover if all ranks hang at the same step, so that no rank waits for another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from chaoskit import Chaos, Outcome
from chaoskit.process.linux import descendants

JOB = "../../jobs/failing/standing.py"
FAULT_STEP = 6  # as in the job
LIMIT_S = 3.0


def run(
    chaos: Chaos, tmp_path: Path, *, ranks: int, where: str = "outside", job: str = JOB, **plan: Any
) -> Outcome:
    """Run the job until the world has ``ranks`` ranks again.

    The unbroken run follows; no rank of it hangs.
    """
    marks = tmp_path / "marks"
    marks.mkdir()
    options = {"marks": str(marks), "where": where, "ranks": ranks} | plan.pop("options", {})
    alone = {"collective_timeout_s": LIMIT_S} if ranks == 1 else {}
    settings = {
        **alone,
        "nodes": ranks,
        "steps": 20,
        "until": {"world": ranks},
        "outside_limit_s": LIMIT_S,
        "deadline_s": 60,
    } | plan
    outcome = chaos.run(job, options=options, check=False, **settings)
    assert {file.name for file in marks.iterdir()} == {str(rank) for rank in range(ranks)}, (
        "all stood still"
    )
    return outcome


def check_recovered(outcome: Outcome, ranks: int) -> None:
    """Check that the job ended with the weights of the unbroken run, and lost no step.

    Raises:
        AssertionError: if it did not.
    """
    detected = outcome.records("detected")
    assert [record["cause"] for record in detected] == ["hung"] * ranks, detected
    assert "and no rank waits for it" in detected[0]["detail"]
    assert all(reason.startswith("no false alarm") for reason in outcome.reasons), outcome.reasons
    assert outcome.lost_steps == 0
    assert outcome.weights_digest == outcome.twin_weights_digest is not None


@pytest.mark.promise("Ranks that all stand still are found, too.", where="outside")
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_all_ranks_stand_still(chaos: Chaos, tmp_path: Path, where: str) -> None:
    """A spare takes the state over from a rank that hangs, and then waits for the other one."""
    outcome = run(chaos, tmp_path, ranks=2, spares=2, where=where)
    check_recovered(outcome, 2)
    assert not any(plan.get("restore") for plan in outcome.records("plan")), (
        "a member had the state all the time"
    )


def test_all_ranks_stand_still_and_no_spare_is_ready(chaos: Chaos, tmp_path: Path) -> None:
    """The second rank is ended when the first replacement, which has to start first, waits for it."""
    check_recovered(run(chaos, tmp_path, ranks=2, spares=0), 2)


@pytest.mark.parametrize("spares", [0, 1])
def test_the_only_rank_stands_still(chaos: Chaos, tmp_path: Path, spares: int) -> None:
    """The arena of the only rank is read from its node, because no member has the state any more."""
    outcome = run(chaos, tmp_path, ranks=1, spares=spares)
    check_recovered(outcome, 1)
    assert [record["step"] for record in outcome.records("restored")] == [FAULT_STEP]


def test_ranks_that_hold_the_interpreter_lock(chaos: Chaos, tmp_path: Path) -> None:
    """Ranks that hold the interpreter lock recover: none of their threads can serve the state while
    they live.
    """
    check_recovered(run(chaos, tmp_path, ranks=2, spares=1, options={"deaf": True}), 2)


def test_a_sharded_job(chaos: Chaos, tmp_path: Path) -> None:
    """All members of a sharded job are replaced with the first one, because they hold the state
    together.
    """
    outcome = run(chaos, tmp_path, ranks=2, spares=1, job=f"{JOB}:sharded", outside_limit_s=LIMIT_S)
    assert {record["cause"] for record in outcome.records("detected")} == {"hung"}
    assert all(reason.startswith("no false alarm") for reason in outcome.reasons), outcome.reasons
    assert outcome.weights_digest == outcome.twin_weights_digest is not None


def test_a_declared_phase_with_a_limit(chaos: Chaos, tmp_path: Path) -> None:
    outcome = run(
        chaos, tmp_path, ranks=2, spares=2, where="long", long_limit_s=LIMIT_S, outside_limit_s=60.0
    )
    check_recovered(outcome, 2)


def test_a_declared_phase_has_no_limit_of_user_code(chaos: Chaos, tmp_path: Path) -> None:
    """All ranks stay in a declared phase for longer than the limit of user code, and go on."""
    options = {"for_s": 2.0}
    outcome = run(
        chaos, tmp_path, ranks=2, spares=0, where="long", outside_limit_s=1.0, options=options
    )
    assert not outcome.records("detected")
    assert outcome.reasons == []


class Pause:
    """A thread that stops processes of this test for a while, as if their machine stood still.

    Args:
        begins: file that begins the pause when it appears.
        for_s: length of the pause.
        below: name of the process that stops, with its descendants; "" for all processes that the
            test has started.
    """

    def __init__(self, begins: Path, for_s: float, below: str) -> None:
        self._begins, self._for_s, self._below = begins, for_s, below
        self.is_over = False
        self._thread = threading.Thread(target=self._pause)

    def __enter__(self) -> Pause:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _pause(self) -> None:
        wait_until(self._begins.exists, "a rank stands still")
        pids = descendants(os.getpid())
        if self._below:
            (head,) = [pid for pid in pids if name_of(pid) == self._below]
            pids = [head, *descendants(head)]
        begun_s = time.monotonic()
        try:
            for pid in pids:  # parents first, so that they do not report their children
                os.kill(pid, signal.SIGSTOP)
                wait_until(lambda pid=pid: state_of(pid) in "TZ", f"process {pid} is stopped")  # type: ignore[misc]
            wait_until(lambda: time.monotonic() > begun_s + self._for_s, "the end of the pause")
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
        self.is_over = True


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.mark.parametrize("below", ["", "ck-node0"], ids=["machine", "node"])
def test_time_in_which_the_machine_stood_still_is_no_hang(
    chaos: Chaos, tmp_path: Path, below: str
) -> None:
    """A pause that is longer than the limit of user code is no hang; the rank has more to do there
    afterwards.
    """
    pause = Pause(tmp_path / "marks" / "0", 1.2 * LIMIT_S, below)
    with pause:
        outcome = run(
            chaos, tmp_path, ranks=1, spares=0, until=None, twin=False, options={"for_s": 2.0}
        )
    assert pause.is_over
    assert outcome.records("detected") == []
    assert outcome.reasons == []
