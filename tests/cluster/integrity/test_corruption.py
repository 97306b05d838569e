"""Silent bit flips in one process are found before they spread; the process is replaced, and
training is the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag

from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.integrity.voting import audit_at
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import WorkerReady
from faults import Fault, Kill
from faults.evidence import Evidence, ReadBack
from faults.target import Target

JOB = "../../jobs/wrong/corrupting.py"
STEPS = 20

Flipped = Callable[..., Outcome]


def journal(outcome: Outcome, event: Event) -> list[Record]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == event
    ]


def named(outcome: Outcome) -> set[tuple[str, str]]:
    """Return the workers that were given up, and the causes."""
    return {(record["worker"], record["cause"]) for record in journal(outcome, Event.DETECTED)}


def verdicts(outcome: Outcome) -> set[tuple[str, str]]:
    """Return the suspected workers, and the verdicts."""
    return {(record["worker"], record["verdict"]) for record in journal(outcome, Event.CORRUPT)}


def culprit(outcome: Outcome, rank: int = 1) -> str:
    """Return the worker that had ``rank`` at first."""
    worker: str = journal(outcome, Event.PLAN)[0]["members"][rank]["worker"]
    return worker


@pytest.fixture
def corrupted(chaos: Chaos, tmp_path: Path) -> Flipped:
    """Return a function that runs the job with bits flipped in one process.

    The harness injects no fault that would explain the detection.
    """

    def run(
        where: str,
        *,
        rank: int = 1,
        at_step: int = 6,
        sticky: bool = False,
        pause: int = 0,
        outside: bool = False,
        meet: int = -1,
        **plan: Any,
    ) -> Outcome:
        marker = tmp_path / "flipped"
        marker.unlink(missing_ok=True)
        options = {
            "where": where,
            "rank": rank,
            "at_step": at_step,
            "sticky": sticky,
            "pause": pause,
        }
        options |= {"outside": outside, "meet": meet}
        settings = {
            "nodes": 3,
            "spares": 1,
            "steps": STEPS,
            "deadline_s": 60.0,
            "state_hash_steps": 1,
        } | plan
        outcome = chaos.run(
            JOB, options=options | {"marker": str(marker)}, twin=False, check=False, **settings
        )
        assert marker.exists() or where in ("", "end"), "no bit was flipped"
        return outcome

    return run


@pytest.fixture
def clean(chaos: Chaos) -> Callable[[int], Outcome]:
    """Return a function that trains the job without flips, for as many shards."""
    return lambda nodes: chaos.run(
        JOB, nodes=nodes, spares=0, steps=STEPS, deadline_s=60.0, twin=False
    )


def assert_unharmed(outcome: Outcome, expected: Outcome) -> None:
    """Assert that the run equals one without flips, except for the alarms, which belong to no
    fault.
    """
    problems = [
        check
        for check in outcome.checks
        if check.verdict != Verdict.PASSED and check.name != "no false alarm"
    ]
    assert not problems, (problems, outcome.directory)
    assert outcome.losses == expected.losses
    assert outcome.weights_digest == expected.weights_digest


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.promise(
    "checksums of a rotating slice of parameters, buffers and optimizer state ride in the reduction",
    where="rate",
    nodes=3,
)
@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("where", ["weight", "frozen", "optimizer", "rate"])
def test_state_that_differs_convicts_the_minority(
    corrupted: Flipped, clean: Any, where: str, nodes: int
) -> None:
    outcome = corrupted(where, nodes=nodes)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(nodes))


@pytest.mark.promise("The state that is compared is the committed one, buffers included")
def test_a_buffer_counts_as_it_was_before_the_forward_pass(corrupted: Flipped, clean: Any) -> None:
    outcome = corrupted("buffer", outside=True)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(3))


@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_of_two_ranks_the_one_that_contradicts_itself_is_guilty(
    corrupted: Flipped, clean: Any, where: str
) -> None:
    """The guilty one of two ranks, which have no majority, remembers its state after the last
    commit.
    """
    outcome = corrupted(where, nodes=2, outside=where == "weight")
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(2))


@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_of_two_ranks_it_is_found_guilty_when_the_slice_is_compared(
    corrupted: Flipped, where: str
) -> None:
    """The guilty rank remembers its state until the slice with the flip is compared."""
    outcome = corrupted(where, nodes=2, outside=where == "weight", state_hash_steps=16, steps=30)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert 6 < min(record["step"] for record in journal(outcome, Event.CORRUPT)) <= 6 + 16


@pytest.mark.promise("else the job ends rather than guess")
def test_two_ranks_that_cannot_tell_end_the_job(corrupted: Flipped) -> None:
    """The job ends, because the bits of a learning rate, which is no tensor, are not remembered."""
    outcome = corrupted("rate", nodes=2)
    assert "silent corruption at step 6" in outcome.reasons[0]
    assert "no vote can decide" in outcome.reasons[0]
    assert "corrupt" not in {cause for _, cause in named(outcome)}


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_slices_find_it_a_little_later(corrupted: Flipped, reduction: str) -> None:
    outcome = corrupted("weight", state_hash_steps=4, reduction=reduction)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert 6 <= min(record["step"] for record in journal(outcome, Event.CORRUPT)) < 10


def test_a_newcomer_that_copied_corrupt_state_is_no_witness_for_it(
    corrupted: Flipped, tmp_path: Path
) -> None:
    """A newcomer that copied a flipped weight is given up with the culprit: two ranks against two.

    The flip comes long before its slice is compared. A rank dies when all others have committed as
    many steps and a spare is ready. Then the newcomer, rank 2 of 4, takes its state from the last
    of the three survivors, the culprit.
    """
    ready: set[str] = set()

    def all_are_ready(message: Any) -> bool:
        ready.update([message.worker] if isinstance(message, WorkerReady) else [])
        return len(ready) == 6

    flag = Flag(tmp_path / "flipped.ready", all_are_ready)
    kill: list[Fault] = [Kill(rank=2, at_step=5)]
    plan = {
        "nodes": 4,
        "spares": 2,
        "rank": 3,
        "at_step": 3,
        "state_hash_steps": 8,
        "steps": 40,
        "faults": kill,
    }
    outcome = corrupted("weight", meet=5, watch=flag, **plan)
    found_ns = min(record.t_ns for record in journal(outcome, Event.CORRUPT))
    guilty = culprit(outcome, 3)
    (copy,) = [record for record in journal(outcome, Event.RESTORED) if record.t_ns < found_ns]
    assert copy["source"] == guilty, outcome.directory
    assert {worker for worker, cause in named(outcome) if cause == "corrupt"} == {
        guilty,
        copy.source,
    }
    assert len({record["weights_digest"] for record in journal(outcome, Event.FINISHED)}) == 1


def test_without_the_state_hash_a_flipped_weight_ends_the_job_only_at_the_end(
    corrupted: Flipped,
) -> None:
    outcome = corrupted("weight", state_hash_steps=0)
    assert len(outcome.steps) == STEPS
    assert "ranks ended with different weights" in outcome.reasons[0]
    assert named(outcome) == verdicts(outcome) == set()


@pytest.mark.promise(
    "the coordinator compares the digests with which they finish, and fails the job"
)
def test_a_flip_after_the_last_step_is_noticed(corrupted: Flipped) -> None:
    outcome = corrupted("end")
    assert len(outcome.steps) == STEPS
    assert "ranks ended with different weights" in outcome.reasons[0]


# -- the reduced gradient --------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("where", ["received", "own segment"])
def test_a_damaged_result_is_reduced_again(
    corrupted: Flipped, clean: Any, where: str, nodes: int
) -> None:
    """A rank with a damaged result takes the step from the other ranks, and is not replaced for one
    flip.
    """
    outcome = corrupted(where, nodes=nodes, buckets=2)
    assert verdicts(outcome) == {(culprit(outcome), "transfer")}
    assert named(outcome) == set()
    assert_unharmed(outcome, clean(nodes))


def test_a_damaged_result_of_the_last_step_is_taken_from_who_finished(
    corrupted: Flipped, clean: Any
) -> None:
    outcome = corrupted("received", at_step=STEPS - 1)
    assert verdicts(outcome) == {(culprit(outcome), "transfer")}
    assert_unharmed(outcome, clean(3))


@pytest.mark.parametrize("where", ["received", "own segment"])
def test_a_rank_that_damages_every_result_is_replaced(
    corrupted: Flipped, clean: Any, where: str
) -> None:
    outcome = corrupted(where, sticky=True)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(3))


def test_of_two_the_one_that_damages_what_it_receives_takes_every_step_from_the_other(
    corrupted: Flipped, clean: Any
) -> None:
    """No rank is replaced, because either may be at fault, but the committed steps are right."""
    outcome = corrupted("received", nodes=2, sticky=True)
    assert verdicts(outcome) == {(culprit(outcome), "transfer")}
    assert len(journal(outcome, Event.CORRUPT)) > 3
    assert named(outcome) == set()
    assert_unharmed(outcome, clean(2))


def test_of_two_the_one_whose_own_segment_changes_is_replaced(
    corrupted: Flipped, clean: Any
) -> None:
    outcome = corrupted("own segment", nodes=2, sticky=True)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(2))


@pytest.mark.promise(
    "every rank compares each rank's news with their checksum, and reads none of those that are wrong",
    reduction="exact",
)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_damaged_news_are_not_believed(corrupted: Flipped, reduction: str) -> None:
    """A rank that received a damaged loss takes the step from the ranks that received it undamaged."""
    outcome = corrupted("news", reduction=reduction)
    assert verdicts(outcome) == {(culprit(outcome), "transfer")}
    (record,) = journal(outcome, Event.CORRUPT)
    assert (record["what"], record["sources"]) == ("received news", [culprit(outcome, 0)])
    assert named(outcome) == set()
    assert_unharmed(outcome, corrupted("", reduction=reduction, at_step=STEPS))


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_rank_that_receives_no_number_from_every_all_reduce_is_replaced(
    corrupted: Flipped, nodes: int
) -> None:
    """A rank is replaced if the others found the same sums finite (reduction ``fast``)."""
    outcome = corrupted("no number", reduction="fast", nodes=nodes, sticky=True)
    assert verdicts(outcome) == {(culprit(outcome), "transfer"), (culprit(outcome), "rank")}
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert journal(outcome, Event.NONFINITE) == []
    assert len({record["weights_digest"] for record in journal(outcome, Event.FINISHED)}) == 1


@pytest.mark.promise(
    "checksums of the result ride in the next step's reduction, and are put to the vote"
)
def test_a_damaged_all_reduce_is_outvoted_in_the_next_step(corrupted: Flipped) -> None:
    """Ranks compare their sums one step later, before they commit.

    Reduction ``fast`` has no single owner of a sum to compare with.
    """
    outcome = corrupted("received", reduction="fast", state_hash_steps=0)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert {record["step"] for record in journal(outcome, Event.CORRUPT)} == {7}


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_without_the_gradient_hash_a_damaged_result_is_committed(
    corrupted: Flipped, reduction: str
) -> None:
    outcome = corrupted("received", hash_every=0, state_hash_steps=0, reduction=reduction)
    assert named(outcome) == verdicts(outcome) == set()
    assert "ranks ended with different weights" in outcome.reasons[0]


# -- shards ----------------------------------------------------------------------------------------


def audited(nodes: int) -> int:
    """Return a step in which the shard of rank 1 is audited, if every step has an audit."""
    return 2 * nodes + 1


@pytest.mark.promise("a result that was wrong only once is only written down", nodes=3)
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_a_gradient_that_was_wrong_once_is_computed_again(
    corrupted: Flipped, clean: Any, nodes: int
) -> None:
    outcome = corrupted("gradient", nodes=nodes, at_step=audited(nodes), audit_every=1, buckets=2)
    assert verdicts(outcome) == {(culprit(outcome), "transient")}
    assert named(outcome) == set()
    assert_unharmed(outcome, clean(nodes))


@pytest.mark.parametrize(("pause", "convicted"), [(102, False), (99, True)])
def test_gradients_that_were_wrong_long_ago_are_forgotten(
    corrupted: Flipped, pause: int, convicted: bool
) -> None:
    """Three mistakes are too many, unless a hundred clean steps lie between."""
    plan = {
        "at_step": audited(3),
        "sticky": True,
        "pause": pause,
        "steps": audited(3) + 2 * pause + 3,
    }
    outcome = corrupted("gradient", audit_every=1, state_hash_steps=16, **plan)
    assert {record["step"] for record in journal(outcome, Event.CORRUPT)} == {
        7,
        7 + pause,
        7 + 2 * pause,
    }
    assert verdicts(outcome) == {(culprit(outcome), "transient")}
    assert named(outcome) == ({(culprit(outcome), "corrupt")} if convicted else set())


@pytest.mark.promise("if bits differ a third one decides", where="gradient", nodes=3)
@pytest.mark.parametrize("where", ["gradient", "noise"])
@pytest.mark.parametrize("nodes", [3, 4])
def test_a_third_rank_convicts_who_computes_wrongly(
    corrupted: Flipped, clean: Any, nodes: int, where: str
) -> None:
    outcome = corrupted(where, nodes=nodes, at_step=audited(nodes), audit_every=1, sticky=True)
    assert verdicts(outcome) == {(culprit(outcome), "rank")}
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(nodes))


@pytest.mark.parametrize("nodes", [3, 4])
def test_an_auditor_that_computes_wrongly_is_convicted(
    corrupted: Flipped, clean: Any, nodes: int
) -> None:
    pair = audit_at(audited(nodes), 1, [[rank] for rank in range(nodes)])
    assert pair is not None
    outcome = corrupted(
        "gradient",
        nodes=nodes,
        rank=pair.auditor,
        at_step=audited(nodes),
        audit_every=1,
        sticky=True,
    )
    assert named(outcome) == {(culprit(outcome, pair.auditor), "corrupt")}
    assert_unharmed(outcome, clean(nodes))


def test_without_a_spare_the_others_take_over_the_shards_of_the_convict(
    corrupted: Flipped, clean: Any
) -> None:
    outcome = corrupted("gradient", spares=0, at_step=audited(3), audit_every=1, sticky=True)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert min(point.world for point in outcome.steps) == 2
    assert_unharmed(outcome, clean(3))


def test_of_two_ranks_the_one_that_computes_differently_each_time_is_guilty(
    corrupted: Flipped, clean: Any
) -> None:
    outcome = corrupted("noise", nodes=2, at_step=5, audit_every=1, sticky=True)
    assert named(outcome) == {(culprit(outcome), "corrupt")}
    assert_unharmed(outcome, clean(2))


def test_two_ranks_that_stand_by_their_words_end_the_job(corrupted: Flipped) -> None:
    outcome = corrupted("gradient", nodes=2, at_step=5, audit_every=1, sticky=True)
    assert "two ranks computed different gradients of shard 1, twice" in outcome.reasons[0]
    assert "corrupt" not in {cause for _, cause in named(outcome)}


def test_without_audits_a_wrong_gradient_is_trained(corrupted: Flipped, clean: Any) -> None:
    """All ranks apply the wrong gradient alike, so that no comparison between them can find it."""
    outcome = corrupted("gradient", at_step=audited(3))
    assert named(outcome) == verdicts(outcome) == set()
    assert outcome.weights_digest != clean(3).weights_digest


def test_a_flip_while_another_rank_dies(chaos: Chaos, corrupted: Flipped, clean: Any) -> None:
    """The round ends before its conclusion, and the corruption is found again."""
    kill = Kill(rank=2, at_step=audited(4), phase="backward")
    outcome = corrupted(
        "gradient", nodes=4, spares=2, at_step=audited(4), audit_every=1, sticky=True, faults=[kill]
    )
    assert (culprit(outcome), "corrupt") in named(outcome)
    assert len(named(outcome)) == 2
    assert_unharmed(outcome, clean(4))


# -- verdicts of the harness -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Announced(Fault):
    """A fault that waits for a file: the job flips its bit by itself in this rank and step, and
    writes the file.
    """

    marker: Path = Path()

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        await target.seen(self.marker.exists)
        yield ReadBack(
            subject=target.rank_process, source="the job's sign", value="a bit was flipped"
        )


@pytest.mark.parametrize(
    ("where", "impact", "recoveries"),
    [
        ("weight", "weights, buffers or optimizer state of rank 1 was corrupt (rank)", 1),
        ("received", "received gradient of rank 1 was corrupt (transfer)", 1),
        ("gradient", "gradient of shard 1 of rank 1 was corrupt (transient)", 0),
    ],
)
def test_a_detection_belongs_to_the_fault_on_its_worker(
    corrupted: Flipped, tmp_path: Path, where: str, impact: str, recoveries: int
) -> None:
    fault = Announced(rank=1, at_step=audited(3), marker=tmp_path / "flipped")
    outcome = corrupted(where, at_step=audited(3), audit_every=1, faults=[fault])
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert outcome.faults[0].evidence[-1].observed == f"step 7: {impact}"
    assert len(outcome.recoveries) == recoveries


def test_a_detection_without_a_fault_is_one_false_alarm(corrupted: Flipped) -> None:
    """Records of all three ranks about one mistake make one false alarm."""
    outcome = corrupted("gradient", at_step=audited(3), audit_every=1)
    assert outcome.verdict == Verdict.FAILED
    assert outcome.false_alarms == 1


# -- healthy runs ----------------------------------------------------------------------------------


CHECKS = {"hash_every": 1, "state_hash_steps": 3, "audit_every": 1}
PLANS = pytest.mark.parametrize(
    "plan", [{}, {"buckets": 2, "shards": 8}, {"reduction": "fast"}, {"transport": "tcp"}], ids=str
)


@PLANS
def test_a_healthy_run_with_resizes_raises_no_alarm(chaos: Chaos, plan: dict[str, Any]) -> None:
    """No alarm is raised with all checks on, ranks lost, ranks joining, and other shards for each
    of them.
    """
    kills: list[Fault] = [Kill(rank=3, at_step=5), Kill(rank=0, at_step=9, phase="optimizer")]
    outcome = chaos.run(
        "gpt", nodes=4, spares=0, steps=60, options={"size": "tiny"}, faults=kills, **CHECKS, **plan
    )
    assert journal(outcome, Event.CORRUPT) == []
    assert outcome.false_alarms == 0
    assert {cause for _, cause in named(outcome)} == {"exited"}


@PLANS
@pytest.mark.parametrize("where", ["weight", "received"])
def test_the_same_checks_find_one_flip(
    corrupted: Flipped, where: str, plan: dict[str, Any]
) -> None:
    """The checks that raise no alarm in a healthy run find one flipped bit, on the right rank."""
    outcome = corrupted(where, nodes=4, **CHECKS | plan)
    assert {worker for worker, _ in verdicts(outcome)} == {culprit(outcome)}


def test_an_audited_run_trains_the_same(chaos: Chaos) -> None:
    """The auditor's extra shard does not disturb the randomness, the sums or the samples."""
    plain, audited = (
        chaos.run("gpt", nodes=4, steps=10, options={"size": "tiny"}, twin=False, audit_every=every)
        for every in (0, 1)
    )
    assert plain.losses == audited.losses
    assert plain.weights_digest == audited.weights_digest
