"""Tests of the membership of a sharded job: all members hold the state together, or none does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.copy_search import ATTEMPTS_MAX
from chaoskit.coordinator.membership.events import (
    Action,
    AskForCopies,
    Convicted,
    FinishJob,
    NodeJoined,
    OrderStart,
    Publish,
    Settled,
    Stalled,
    Tick,
)
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import LogEntry, Send
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.job import JobSpec
from chaoskit.wire import messages
from chaoskit.wire.messages import (
    AgentHello,
    Endpoint,
    Healed,
    NodeLost,
    OfferedSnapshot,
    Plan,
    Sealed,
    SourceFailed,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)

NODES = "abc"


def config_of(**changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {"nodes": 3, "spares": 0, "replacement_s": 5.0, "startup_s": 20.0}
    return RunConfig(job=JobSpec("train.py", sharded=True), **defaults | changes)


def endpoint(port: int = 0) -> Endpoint:
    return Endpoint("host", "127.0.0.1", port, 1, -1)


def piece(
    node: str, number: int, step: int, generation: int = 1, pieces: int = 3, port: int = 0
) -> OfferedSnapshot:
    """A copy of piece ``number``, kept on ``node``."""
    owner = f"{NODES[number]}.0"
    return OfferedSnapshot(
        node, owner, step, generation, 8, f"{step}", endpoint(port), "memory", number, pieces
    )


class Job:
    """A membership with nodes that answer as they are told to."""

    def __init__(self, **changes: Any) -> None:
        self.config = config_of(**changes)
        self.machine = Membership(self.config)
        self.now_s = 0.0
        self.plans: list[Plan] = []
        self.asked: list[AskForCopies] = []
        self.finish: FinishJob | None = None
        self.starting: list[str] = []
        for node in NODES[: self.config.nodes]:
            self.tell(NodeJoined(node))
        self.become_ready()
        self.settle()

    def tell(self, *told: events.MembershipEvent) -> list[Action]:
        actions: list[Action] = []
        for event in told:
            actions += handle(self.machine, event, self.now_s)
        for action in actions:
            match action:
                case Publish(plan):
                    self.plans.append(plan)
                case AskForCopies():
                    self.asked.append(action)
                case OrderStart(_, worker):
                    self.starting.append(worker)
                case FinishJob():
                    self.finish = action
        return actions

    def wait(self, seconds: float) -> None:
        """Let time pass, in ticks."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.finish:
            self.now_s = min(until_s, self.now_s + 0.05)
            self.tell(Tick())

    def become_ready(self) -> None:
        workers, self.starting = self.starting, []
        self.tell(
            *(WorkerReady(worker, worker.partition(".")[0], endpoint()) for worker in workers)
        )

    def settle(self, *, healed: bool = True) -> None:
        self.tell(Settled(self.machine.generation))
        if healed and self.machine.generation > 1:
            self.tell(*(Healed(worker) for worker in self.machine.members))

    def answer(self, *, committed: int = 9, **kept: list[OfferedSnapshot]) -> None:
        """Let all nodes answer the newest question with the copies that are ``kept`` there."""
        number = self.machine.question_number
        nodes = [node for node in self.machine.nodes if self.machine.awaits_answer_of(node)]
        self.tell(*(Sealed(node, tuple(kept.get(node, ())), number, committed) for node in nodes))

    def answer_all(self, step: int, generation: int = 1) -> None:
        """Keep every piece of ``step`` on its own node and on the next one."""
        self.answer(
            **{
                node: [piece(node, n, step, generation) for n in (i, (i - 1) % 3)]
                for i, node in enumerate(NODES)
            }
        )

    @property
    def restored(self) -> int:
        """The step with which the last plan begins."""
        return max(snapshot.step for snapshot in self.plans[-1].restore)


# -- a loss ----------------------------------------------------------------------------------------


def test_with_one_rank_all_leave_and_begin_with_the_newest_pieces() -> None:
    job = Job()
    job.tell(WorkerLost("b.0"))
    assert [ask.node for ask in job.asked] == list(NODES)
    assert len(job.plans) == 1, "nothing is known yet"
    job.become_ready()
    job.answer_all(7)
    plan = job.plans[-1]
    assert (plan.generation, plan.abort, job.restored) == (2, True, 7)
    assert {member.worker for member in plan.members} == {"a.0", "b.1", "c.0"}
    assert {snapshot.piece for snapshot in plan.restore} == {0, 1, 2}


def replica(node: str, owner: str, number: int, step: int) -> OfferedSnapshot:
    """A copy of piece ``number`` of two, of the worker ``owner``, kept on ``node``."""
    return msgspec.structs.replace(piece(node, number, step, pieces=2), worker=owner)


@pytest.mark.promise("no copy of a convict's piece is taken over")
@pytest.mark.parametrize("lost_before", [False, True])
@pytest.mark.parametrize("known_before", [False, True])
def test_copies_of_a_convict_are_not_taken_though_they_are_newer(
    known_before: bool, lost_before: bool
) -> None:
    """Piece 0 is held by a.0 and b.0, piece 1 by c.0. What b.0 has left may be as corrupt as its rank was.

    Args:
        known_before: nodes have told of the copies.
        lost_before: the convict was lost for another reason.
    """
    job = Job()
    kept = {
        "a": [
            replica("a", "a.0", 0, 6),
            replica("a", "b.0", 0, 7),
        ],  # one of its own, one of its partner
        "b": [replica("b", "b.0", 0, 7), replica("b", "a.0", 0, 6)],
        "c": [replica("c", "c.0", 1, 6), replica("c", "c.0", 1, 7)],
    }
    if lost_before:
        job.tell(WorkerLost("b.0", cause="exited"))
    if known_before:
        job.tell(WorkerLost("c.0"))
        job.answer(**kept)
    job.tell(Convicted(("b.0",)), WorkerLost("b.0", cause="corrupt"))
    job.become_ready()
    job.answer(**kept)
    job.wait(1.0)
    assert job.restored == 6
    assert {snapshot.worker for snapshot in job.plans[-1].restore} == {"a.0", "c.0"}


def test_a_job_of_which_only_a_convict_has_a_piece_is_lost() -> None:
    job = Job()
    job.tell(Convicted(("b.0",)), WorkerLost("b.0", cause="corrupt"))
    job.become_ready()
    for _ in range(100):
        job.answer(
            a=[piece("a", 0, 7), piece("a", 1, 7)], b=[piece("b", 1, 7)], c=[piece("c", 2, 7)]
        )
        job.wait(1.0)
    assert job.finish is not None
    assert "copies of ranks whose state was found corrupt are not taken" in job.finish.reason


def test_a_set_with_a_piece_missing_is_never_offered() -> None:
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    kept = {node: [piece(node, i, 6), piece(node, i, 7)] for i, node in enumerate(NODES)}
    kept["b"].pop()
    job.answer(**kept)
    job.wait(1.0)
    job.answer(**kept)
    assert {snapshot.step for snapshot in job.plans[-1].restore} == {6}


def test_pieces_of_two_cuts_are_never_mixed() -> None:
    """Three ranks and then two held the same step."""
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("c.0"))
    cuts = {node: [piece(node, i, 7)] for i, node in enumerate(NODES)}
    cuts["a"].append(piece("a", 0, 7, pieces=2))
    cuts["b"].append(piece("b", 1, 7, pieces=2))
    job.answer(**cuts)
    job.become_ready()
    job.wait(1.0)
    job.answer(**cuts)
    assert len({snapshot.pieces for snapshot in job.plans[-1].restore}) == 1


def test_a_replacement_is_waited_for_so_long_and_no_longer() -> None:
    job = Job()
    job.tell(WorkerLost("b.0"))
    job.answer_all(7)
    job.wait(job.config.replacement_s - 0.1)
    assert len(job.plans) == 1
    job.wait(0.2)
    job.answer_all(7)
    assert len(job.plans[-1].members) == 2


def test_what_was_answered_long_ago_is_asked_again() -> None:
    """Ranks that a silent node still takes part with train on while its replacement is started."""
    job = Job()
    job.tell(WorkerLost("b.0"))
    job.answer_all(7)
    job.wait(10 * LIMITS.fresh_s)
    job.become_ready()
    assert len(job.plans) == 1, "it went back to what was stored before the wait"
    job.answer_all(9)
    assert job.restored == 9


def test_an_answer_to_an_earlier_question_is_not_heard() -> None:
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    stale, first = piece("a", 0, 3), job.machine.question_number
    job.become_ready()
    job.answer_all(7)
    job.settle()
    job.tell(WorkerLost("b.1"))
    job.tell(Sealed("a", (stale,), first))
    assert job.machine.awaits_answer_of("a")


def test_without_all_pieces_the_job_is_lost_after_a_while() -> None:
    job = Job(replacement_s=0.0)
    job.tell(NodeLost("b"))
    for _ in range(100):
        job.answer(a=[piece("a", 0, 7)], c=[piece("c", 2, 7)])
        job.wait(0.1)
    assert job.finish
    assert "every replica was lost" in job.finish.reason
    assert LIMITS.healing_s < job.now_s < 2 * LIMITS.healing_s


def test_a_node_that_comes_back_with_the_last_piece_is_in_time() -> None:
    job = Job(replacement_s=0.0)
    job.tell(NodeLost("b"))
    job.answer(a=[piece("a", 0, 7)], c=[piece("c", 2, 7)])
    job.wait(LIMITS.healing_s / 2)
    job.tell(NodeJoined("b", "again"))
    job.become_ready()
    job.answer(a=[piece("a", 0, 7)], b=[piece("b", 1, 7)], c=[piece("c", 2, 7)])
    job.wait(0.3)
    job.answer(a=[piece("a", 0, 7)], b=[piece("b", 1, 7)], c=[piece("c", 2, 7)])
    assert job.plans[-1].restore
    assert not job.finish


def test_a_piece_that_was_sealed_after_its_node_had_answered_is_found() -> None:
    """The last members end just after the nodes answered: their copies, then under way, are complete by now."""
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.answer(a=[piece("a", 0, 7)], b=[piece("b", 1, 7)])
    job.now_s += LIMITS.fresh_s / 2
    job.tell(WorkerLost("a.0"), WorkerLost("c.0"))
    assert not job.finish
    job.become_ready()
    job.answer_all(7)
    assert job.restored == 7


def test_a_piece_that_was_sealed_after_its_node_was_asked_is_found() -> None:
    """The answers were put together before the last members ended, and come after that."""
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.now_s += LIMITS.fresh_s / 2
    job.tell(WorkerLost("a.0"), WorkerLost("c.0"))
    job.now_s += 0.01
    job.answer(a=[piece("a", 0, 7)], b=[piece("b", 1, 7)])
    assert not job.finish
    job.become_ready()
    job.answer_all(7)
    assert job.restored == 7


def test_without_all_pieces_a_job_whose_members_have_ended_is_lost_at_once() -> None:
    job = Job(replacement_s=0.0)
    job.tell(*(WorkerLost(f"{node}.0") for node in NODES))
    job.answer(a=[piece("a", 0, 7)], b=[piece("b", 1, 7)])
    assert job.finish
    assert "every replica was lost" in job.finish.reason


def test_a_first_generation_without_copies_begins_anew() -> None:
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.become_ready()
    job.answer(committed=0, a=[piece("a", 0, 0)])
    assert len(job.plans) == 2
    assert not job.plans[-1].restore
    job.wait(1.0)
    assert len(job.plans) == 2, "one new beginning is enough"


def test_ranks_that_trained_on_while_a_replacement_was_awaited_do_not_begin_anew() -> None:
    """The answers that no node had a copy came before the wait."""
    job = Job(replacement_s=3.0)
    job.tell(WorkerLost("b.0"))
    while job.now_s < LIMITS.healing_s + 0.5:
        job.answer(committed=0, a=[piece("a", 0, 0)])
        job.wait(0.1)
    job.wait(1.0)
    job.answer(committed=5, a=[piece("a", 0, 5)])
    job.wait(0.5)
    assert len(job.plans) == 1


def test_who_has_trained_never_begins_anew() -> None:
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.become_ready()
    job.answer(committed=5, a=[piece("a", 0, 0)])
    job.wait(0.5)
    assert len(job.plans) == 1


def test_a_worker_lost_before_its_generation_is_known_to_be_formed_may_have_trained() -> None:
    job = Job.__new__(Job)
    genuine, Job.settle = Job.settle, lambda self, **more: None  # type: ignore[method-assign]
    try:
        job.__init__(replacement_s=0.0)  # type: ignore[misc]
    finally:
        Job.settle = genuine  # type: ignore[method-assign]
    job.tell(WorkerLost("b.0"))
    assert [ask.node for ask in job.asked] == list(NODES)


# -- losses on the way back ------------------------------------------------------------------------


def restoring(**changes: Any) -> Job:
    """A job in its second generation, which begins with step 7."""
    job = Job(**changes)
    job.tell(WorkerLost("b.0"))
    job.become_ready()
    job.answer_all(7)
    assert job.restored == 7
    return job


def test_a_conviction_while_its_copies_are_restored_begins_with_others() -> None:
    """The convict was lost before it was accused, so a plan names its copies."""
    job = restoring()
    job.tell(Convicted(("b.0",)))
    job.answer(a=[piece("a", 0, 6), piece("a", 1, 6)], b=[piece("b", 1, 7)], c=[piece("c", 2, 6)])
    assert len(job.plans) == 2, "of what is left no state is complete"
    job.wait(1.0)
    others = [msgspec.structs.replace(piece("a", 1, 6), worker="d.0")]
    job.answer(a=[piece("a", 0, 6), *others], b=[], c=[piece("c", 2, 6)])
    job.wait(1.0)
    assert (len(job.plans), job.restored) == (3, 6)


def test_a_conviction_that_concerns_no_copy_of_the_plan_changes_nothing() -> None:
    job = restoring()
    job.tell(Convicted(("d.0",)))
    job.wait(1.0)
    assert len(job.plans) == 2


def test_a_loss_while_restoring_asks_again() -> None:
    """The members may have trained on without a report."""
    job = restoring()
    job.tell(WorkerLost("c.0"))
    job.become_ready()
    assert len(job.plans) == 2
    job.answer_all(9, 2)
    assert job.restored == 9


def test_who_had_a_piece_in_the_generation_before_must_take_it_over_anew() -> None:
    job = restoring()
    job.tell(Healed("a.0"), WorkerLost("c.0"))
    job.become_ready()
    job.answer_all(7)
    job.tell(Settled(3), Healed("b.1"), Healed("c.1"))
    job.tell(WorkerLost("c.1"))
    assert len(job.asked) == 9, "not all of them had the state"


def test_a_copy_that_is_gone_was_overwritten_by_a_newer_one() -> None:
    job = restoring()
    job.tell(*(SourceFailed("", copy, False) for copy in job.plans[-1].restore if copy.piece == 1))
    assert len(job.plans) == 2
    job.answer_all(9, 2)
    assert job.restored == 9


def test_a_copy_that_is_gone_again_and_again_is_given_up_for_an_older_one() -> None:
    job = restoring()
    kept = {
        n: [piece(n, i, 6), piece(n, i, 7), piece(n, (i - 1) % 3, 7)] for i, n in enumerate(NODES)
    }
    plans = 0
    while job.now_s < 4 * LIMITS.reach_s and job.restored == 7:
        if len(job.plans) > plans:
            plans = len(job.plans)
            job.tell(
                *(
                    SourceFailed("", copy, False)
                    for copy in job.plans[-1].restore
                    if copy.piece == 1
                )
            )
        job.answer(**kept)
        job.wait(0.05)
    assert job.restored == 6
    assert LIMITS.reach_s < job.now_s < 4 * LIMITS.reach_s


def test_nobody_goes_back_to_old_copies_before_all_have_answered() -> None:
    """The members of a generation that could not begin have nothing newer than the others."""
    job = restoring()
    job.tell(*(SourceFailed("", copy, False) for copy in job.plans[-1].restore if copy.piece == 1))
    number, old = job.machine.question_number, tuple(piece("a", n, 3) for n in range(3))
    job.tell(
        NodeJoined("d"), Sealed("a", old, number), Sealed("b", (), number), Sealed("c", (), number)
    )
    assert len(job.plans) == 2
    job.tell(Sealed("d", tuple(piece("d", n, 7) for n in range(3)), number))
    assert job.restored == 7


def attempts(job: Job, until_s: float) -> list[float]:
    """Return the times at which copies are tried while piece 1 is out of reach in a parted network."""
    tried_s: list[float] = []
    while not job.finish and job.now_s < until_s:
        if len(job.plans) > len(tried_s) + 1:
            tried_s.append(job.now_s)
            job.tell(
                *(
                    SourceFailed("", copy, False)
                    for copy in job.plans[-1].restore
                    if copy.piece == 1
                )
            )
        else:
            job.wait(0.1)
        job.answer_all(7)
    return tried_s


def test_copies_out_of_reach_are_tried_again_later_and_later() -> None:
    job = restoring()
    tried_s = attempts(job, 10.0)
    pauses_s = [after - before for before, after in pairwise(tried_s)]
    soon = [0.0] * (ATTEMPTS_MAX - 1)
    later = [LIMITS.retry_s * factor for factor in (1, 2, 4, 8)]
    assert pauses_s == pytest.approx([*soon, *later], abs=0.3)
    job.wait(LIMITS.retry_max_s)
    job.answer_all(7)
    assert not job.finish, "every copy is there"
    job.settle()
    assert len(job.machine.keepers) == 3


def test_copies_that_stay_out_of_reach_are_not_waited_for_without_end() -> None:
    job = restoring()
    attempts(job, 4 * job.config.startup_s)
    assert job.finish
    assert "every replica was lost" in job.finish.reason
    assert job.now_s == pytest.approx(2 * job.config.startup_s, abs=1.0)


def test_a_corrupt_copy_is_never_tried_again() -> None:
    job = restoring()
    job.tell(*(SourceFailed("", copy, True) for copy in job.plans[-1].restore if copy.piece == 1))
    while not job.finish and job.now_s < job.config.startup_s:
        job.answer(**{n: [*(p for p in job.plans[-1].restore if p.node == n)] for n in NODES})
        job.wait(0.1)
    assert len(job.plans) == 2
    assert job.finish
    assert job.now_s < 2 * LIMITS.healing_s


def test_a_node_that_was_only_silent_may_come_back_with_the_last_piece() -> None:
    """The coordinator itself may be cut off from most of its nodes."""
    job = Job(replacement_s=0.0)
    job.tell(NodeLost("b", silent=True), NodeLost("c", silent=True))
    while not job.finish and job.now_s < job.config.coordinator_outage_s - 1:
        job.answer(a=[piece("a", 0, 7)])
        job.wait(0.2)
    assert not job.finish
    job.tell(NodeJoined("b"), NodeJoined("c"))
    job.become_ready()
    for _ in range(3):
        job.answer_all(7)
        job.wait(0.2)
    assert job.restored == 7


def test_a_silent_node_is_not_waited_for_longer_than_its_lease() -> None:
    job = Job(replacement_s=0.0)
    job.tell(NodeLost("b", silent=True))
    while not job.finish and job.now_s < 2 * job.config.coordinator_outage_s:
        job.answer(a=[piece("a", 0, 7)])
        job.wait(0.2)
    assert job.finish
    assert job.now_s == pytest.approx(job.config.coordinator_outage_s, abs=1.0)


def test_who_comes_back_may_have_trained_on_with_the_others_until_it_answers() -> None:
    """Its workers are fenced when it attaches; its answer is the first that comes after that for certain."""
    job = Job(replacement_s=0.0)
    job.tell(NodeLost("b", silent=True))
    job.answer(a=[piece("a", 0, 7), piece("a", 2, 7)], c=[piece("c", 2, 7), piece("c", 1, 7)])
    number = job.machine.question_number
    job.tell(NodeJoined("b", started=1))
    job.become_ready()
    job.wait(2 * LIMITS.fresh_s)
    job.tell(Sealed("b", (piece("b", 1, 9), piece("b", 0, 9)), number, 9))
    assert len(job.plans) == 1, "it went back to what was told before"
    job.answer_all(9)
    assert job.restored == 9


def test_a_rank_that_hangs_while_it_restores_is_replaced_before_the_job_is_lost() -> None:
    job = restoring()
    job.wait(job.config.startup_s + 1)
    job.tell(WorkerLost("c.0", cause="hung"))
    job.become_ready()
    job.answer_all(7)
    job.settle()
    assert not job.finish


def test_a_stall_brings_the_same_members_back() -> None:
    job = Job()
    job.tell(Stalled(1))
    job.answer_all(7)
    assert job.restored == 7
    assert len(job.plans[-1].members) == 3


def test_a_node_that_owes_an_answer_is_waited_for_so_long() -> None:
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.become_ready()
    number = job.machine.question_number
    kept = tuple(piece("a", n, 7) for n in range(3))
    job.tell(Sealed("a", kept, number))
    job.wait(LIMITS.recall_s - 0.1)
    assert len(job.plans) == 1
    job.wait(0.2)
    assert job.restored == 7


# -- growth ----------------------------------------------------------------------------------------


def short() -> Job:
    """Two ranks of three train, and a worker for the third becomes ready."""
    job = Job(replacement_s=0.0)
    job.tell(WorkerLost("b.0"))
    job.answer_all(7)
    job.wait(0.5)
    if job.machine.question_number and job.machine.awaits_answer_of("a"):
        job.answer_all(7)
    assert len(job.plans[-1].members) == 2
    job.settle()
    job.become_ready()
    job.tell(Tick())
    return job


def test_a_world_grows_with_the_newest_pieces() -> None:
    job = short()
    assert len(job.plans) == 2, "it grew without a state"
    job.answer_all(12, 2)
    assert (len(job.plans[-1].members), job.restored) == (3, 12)


def test_answers_between_two_steps_are_asked_for_again() -> None:
    job = short()
    for _ in range(50):
        job.answer(a=[piece("a", 0, 11, 2, 2)], c=[piece("c", 1, 12, 2, 2)])
        job.wait(0.2)
    assert len(job.plans) == 2
    assert not job.finish, "all train on"
    job.answer(a=[piece("a", 0, 60, 2, 2)], c=[piece("c", 1, 60, 2, 2)])
    assert job.restored == 60


def test_growth_ends_with_its_spare() -> None:
    job = short()
    job.tell(WorkerLost("b.1"))
    job.wait(1.0)
    assert len(job.plans) == 2
    assert job.machine.keepers == {"a", "c"}


# -- the end ---------------------------------------------------------------------------------------


def test_a_rank_lost_at_the_end_takes_the_word_of_the_others_with_it() -> None:
    job = Job()
    job.tell(WorkerDone("a.0", 20), WorkerDone("b.0", 20), WorkerLost("c.0"))
    assert not job.finish
    job.become_ready()
    job.answer_all(20)
    job.settle()
    job.tell(WorkerDone("a.0", 20), WorkerDone("b.0", 20))
    assert not job.finish
    job.tell(WorkerDone("c.1", 20))
    assert job.finish
    assert job.finish.ok


# -- through the control plane ---------------------------------------------------------------------


@pytest.fixture
def plane() -> ControlPlane:
    """Return two ranks in their second generation, of which none has taken its piece over yet."""
    plane = ControlPlane(config_of(nodes=2, replacement_s=0.0))
    for node in "ab":
        plane.attach(AgentHello(node, "host", 1), 0.0)
    for worker in ("a.0", "b.0"):
        plane.hear(messages.WorkerReady(worker, worker[0], endpoint()), 0.0)
    for worker in ("a.0", "b.0"):
        plane.hear(messages.Formed(worker, 1), 0.0)
    plane.hear(messages.WorkerLost("b.0", "b", "killed", "", 0), 1.0)
    plane.hear(messages.WorkerReady("b.1", "b", endpoint()), 1.0)
    for node, number in ("a", 0), ("b", 1):
        plane.hear(
            messages.Sealed(
                node, (piece(node, number, 7, pieces=2),), plane.membership.question_number, 7
            ),
            1.0,
        )
    assert plane.membership.generation == 2
    return plane


@pytest.mark.parametrize(
    "said", [messages.Healed("a.0", 1), messages.WorkerDone("a.0", 20, "digest", 1)]
)
def test_what_was_said_of_an_older_generation_is_not_remembered(
    plane: ControlPlane, said: messages.Message
) -> None:
    assert not [output for output in plane.hear(said, 1.1) if isinstance(output, LogEntry)]
    current = msgspec.structs.replace(said, generation=2)  # type: ignore[type-var]
    assert [output for output in plane.hear(current, 1.1) if isinstance(output, LogEntry)]


def test_fewer_ranks_may_end_with_other_bits_than_those_before(plane: ControlPlane) -> None:
    plane.hear(messages.WorkerDone("a.0", 20, "two ranks", 2), 1.1)
    plane.hear(messages.WorkerLost("b.1", "b", "killed", "", 0), 1.2)
    asked = plane.membership.question_number
    plane.hear(messages.WorkerReady("b.2", "b", endpoint()), 1.2)
    for node, number in ("a", 0), ("b", 1):
        plane.hear(messages.Sealed(node, (piece(node, number, 7, pieces=2),), asked, 7), 1.2)
    for worker in ("a.0", "b.2"):
        plane.hear(messages.WorkerDone(worker, 20, "other bits", 3), 1.3)
    assert plane.membership.finished
    assert plane.messages_for_observer()[-1] == messages.EndJob(
        True, "every rank committed the last step"
    )


def test_a_node_that_comes_back_is_asked_the_same_question_again(plane: ControlPlane) -> None:
    plane.hear(messages.WorkerLost("b.1", "b", "killed", "", 0), 1.2)
    outputs = plane.attach(AgentHello("a", "host", 1, 2, ("a.0",), started=1), 1.3)
    assert Send("a", messages.Recall(plane.membership.question_number)) in outputs
