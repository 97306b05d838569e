"""Real jobs that lose every worker at once go on from the agents' memory, as the same training run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag

from chaoskit.checkpoint.layout.arena import DATA_OFFSET
from chaoskit.daemon import process
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Record, read_journals
from chaoskit.process.linux import children, is_ending, process_name
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import EndJob, Heartbeat, OfferedSnapshot, Plan, Sealed, WorkerReady
from faults import Kill, KillNode

JOB = str(Path(__file__).parents[2] / "jobs" / "failing" / "doomed.py")
STEPS = 20
DEADLINE_S = 60.0
TWINS = {"step_s", "frozen_mb"}  # options of the training itself, not of its faults


def run(chaos: Chaos, *, most_lost: float = 0, **plan: Any) -> Outcome:
    """Run an experiment that must pass every check except "no false alarm", with the losses and
    weights of its twin.
    """
    options = {"step_s": 0.01} | plan.pop("options", {})
    settings = {
        "nodes": 3,
        "spares": 1,
        "steps": STEPS,
        "deadline_s": DEADLINE_S,
        "copies": "every_step",
    } | plan
    outcome = chaos.run(JOB, twin=False, check=False, options=options, **settings)
    problems = [
        check
        for check in outcome.checks
        if check.verdict != Verdict.PASSED and check.name != "no false alarm"
    ]
    assert not problems, outcome.directory
    common = {
        "nodes": settings["nodes"],
        "shards": settings.get("shards", 0),
        "steps": len(outcome.steps),
    }
    twin = chaos.harness.twin(
        plan_experiment(JOB, options={name: options[name] for name in TWINS & {*options}}, **common)
    )
    assert [point.loss for point in outcome.steps] == twin.losses, outcome.directory
    assert outcome.weights_digest == twin.weights_digest, outcome.directory
    assert outcome.lost_steps <= most_lost, outcome.directory
    return outcome


def run_with_kills(chaos: Chaos, tmp_path: Path, killer: Killer, **plan: Any) -> Outcome:
    """Run an experiment, as `run` does, that goes on until ``killer`` is done."""

    def is_done(message: Any) -> bool:
        killer(message)
        return killer.is_done

    flag = Flag(tmp_path / "done", is_done)
    return run(chaos, watch=flag, until=flag.until, **plan)


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def restored(outcome: Outcome) -> list[int]:
    """Return the steps of states that were read from the agents' memory."""
    return [
        record["step"]
        for record in journal(outcome, Event.RESTORED)
        if record["source"].startswith("memory of ")
    ]


def repeated(outcome: Outcome) -> list[int]:
    """Return the steps that were computed in more than one generation."""
    generations_of: dict[int, set[int]] = {}
    for record in journal(outcome, Event.COMMIT):
        generations_of.setdefault(record["step"], set()).add(record["generation"])
    return [step for step, generations in generations_of.items() if len(generations) > 1]


class Killer:
    """A watcher that kills all workers from outside, and records what the coordinator's messages
    tell.
    """

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.plans: list[Plan] = []
        self.sealed: list[OfferedSnapshot] = []
        self.committed = 0
        self.plans_before = 0  # number of plans at that time
        self.has_killed = False
        self.over = False

    def __call__(self, message: Any) -> None:
        match message:
            case WorkerReady(worker, _, endpoint):
                self.pids[worker] = endpoint.pid
            case Plan():
                self.plans.append(message)
            case Sealed(_, snapshots):
                self.sealed += snapshots
            case Heartbeat(_, beats):
                self.committed = max([self.committed, *(beat.step for beat in beats)])
            case EndJob():
                self.over = True
        if not self.over:
            self.act(message)

    @property
    def is_done(self) -> bool:
        """True if a plan was published after the kills."""
        return self.has_killed and len(self.plans) > self.plans_before

    def act(self, message: Any) -> None:
        """Act on a message: kill all workers once, after step 5.

        Subclasses extend or replace this.
        """
        if not self.has_killed and self.committed >= 5:
            self.has_killed, self.plans_before = True, len(self.plans)
            self.kill_all_workers()

    def kill_all_workers(self) -> None:
        """Kill all workers, spares included, in quick succession."""
        for pid in self.pids.values():
            if not is_ending(pid):
                os.kill(pid, signal.SIGKILL)


def torn(tmp_path: Path, ranks: int, *steps: int) -> dict[str, Any]:
    """Return options of a job in which ``ranks`` ranks end in the middle of the update of each of
    ``steps``.
    """
    return {
        "fatal": {str(step): list(range(ranks)) for step in steps},
        "marker": str(tmp_path / "ended"),
    }


def one_ahead(tmp_path: Path) -> dict[str, Any]:
    """Return options of a job in which ranks 1 and 2 end in the update of step 7 when rank 0 has
    committed it.
    """
    return {"fatal": {"7": [1, 2]}, "marker": str(tmp_path / "ended"), "ahead": 0}


def ended(tmp_path: Path) -> set[str]:
    """Return step and rank of each worker that has ended itself."""
    return {path.name.removeprefix("ended.") for path in tmp_path.glob("ended.[0-9]*")}


# -- at every moment -------------------------------------------------------------------------------


@pytest.mark.promise("also copy committed states into one of two slots", where="torn", nodes=3)
@pytest.mark.promise(
    "Keepers map the arenas of their node's workers, so an arena outlives its worker",
    where="backward",
    nodes=2,
)
@pytest.mark.parametrize(("nodes", "spares"), [(2, 0), (3, 1), (4, 0)])
@pytest.mark.parametrize("where", ["forward", "backward", "update", "torn"])
def test_every_rank_ends_at_once(
    chaos: Chaos, tmp_path: Path, where: str, nodes: int, spares: int
) -> None:
    """A run in which all ranks end in step 7 goes on from step 7.

    With ``torn`` the arenas are unusable, and the copies are read.
    """
    options = torn(tmp_path, nodes, 7) | {"where": where}
    outcome = run(chaos, nodes=nodes, spares=spares, options=options)
    assert set(restored(outcome)) == {7}, outcome.directory
    assert len(repeated(outcome)) <= 1, outcome.directory


def test_every_rank_is_killed_before_the_reduction(chaos: Chaos) -> None:
    outcome = run(
        chaos,
        nodes=2,
        spares=0,
        faults=[Kill(rank=rank, at_step=7, phase="reduce") for rank in range(2)],
    )
    assert set(restored(outcome)) == {7}, outcome.directory
    assert repeated(outcome) == []


def test_it_happens_twice(chaos: Chaos, tmp_path: Path) -> None:
    """The second restore reads copies of workers that were restored themselves."""
    outcome = run(chaos, options=torn(tmp_path, 3, 6, 7))
    assert set(restored(outcome)) == {6, 7}, outcome.directory


def test_some_are_a_step_ahead(chaos: Chaos, tmp_path: Path) -> None:
    """The newest state is the arena of a rank that committed a step in which all others tore their
    state.
    """
    faults = [Kill(rank=0, at_step=8)]
    outcome = run(chaos, spares=0, options=one_ahead(tmp_path), faults=faults, memory_copies=0)
    assert ended(tmp_path) == {"7.1", "7.2"}
    assert set(restored(outcome)) == {8}, outcome.directory
    assert repeated(outcome) == []


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_process_that_has_torch_is_killed(
    chaos: Chaos, tmp_path: Path, transport: str
) -> None:
    """All workers are killed at any moment, spares included, and no more than one step is repeated."""
    outcome = run_with_kills(chaos, tmp_path, Killer(), transport=transport)
    assert len(repeated(outcome)) <= 1, outcome.directory
    assert len(set(restored(outcome))) == 1, outcome.directory
    transports = {record["transport"] for record in journal(outcome, Event.RESTORED)}
    assert transports == {"tcp" if transport == "tcp" else "shared memory"}


def test_in_the_last_step(chaos: Chaos, tmp_path: Path) -> None:
    """All ranks end in the last update, which is repeated from the copies of the state before."""
    outcome = run(chaos, options=torn(tmp_path, 3, STEPS - 1))
    assert ended(tmp_path) == {f"{STEPS - 1}.{rank}" for rank in range(3)}
    assert set(restored(outcome)) == {STEPS - 1}, outcome.directory


@pytest.mark.parametrize("spares", [0, 1])
def test_in_the_first_step(chaos: Chaos, tmp_path: Path, spares: int) -> None:
    """The spare and new workers begin with the initial state if the first update is torn."""
    outcome = run(chaos, spares=spares, options=torn(tmp_path, 3, 0))
    assert ended(tmp_path) == {f"0.{rank}" for rank in range(3)}
    assert restored(outcome) == [], outcome.directory


# -- agents and workers are lost -------------------------------------------------------------------


class NodeKiller(Killer):
    """A watcher that kills all workers and the agent of the node that keeps the first copy."""

    def kill_all_workers(self) -> None:
        first = next(member for member in self.plans[-1].members if member.rank == 0)
        fork_server = _parent(first.endpoint.pid)
        agent = _parent(fork_server)
        super().kill_all_workers()
        os.kill(agent, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_agent_is_lost_as_well(chaos: Chaos, tmp_path: Path) -> None:
    """The state comes from the memory of another node, never from that of the lost node.

    Two nodes keep copies: the kills may land in the update of every rank that is left.
    """
    killer = NodeKiller()
    outcome = run_with_kills(chaos, tmp_path, killer, nodes=3, memory_copies=2)
    assert killer.has_killed
    (lost,) = {record["node"] for record in journal(outcome, Event.NODE_LOST)}
    sources = {record["source"] for record in journal(outcome, Event.RESTORED)}
    assert f"memory of {lost}" not in sources, outcome.directory
    assert restored(outcome), "the state of no node's memory was of use"
    assert len(repeated(outcome)) <= 1, outcome.directory


# -- damaged copies --------------------------------------------------------------------------------


class CopyDamager(Killer):
    """A watcher that changes one byte of the sealed copies.

    Args:
        node: the node with the damaged copies; all nodes if empty.
        kills: also kill all workers, after some steps.
    """

    def __init__(self, node: str = "", *, kills: bool = True) -> None:
        super().__init__()
        self.node = node
        self.has_killed = not kills

    def act(self, message: Any) -> None:
        if isinstance(message, Sealed):
            for snapshot in message.snapshots:
                if self.node in ("", snapshot.node):
                    path = f"/proc/{snapshot.endpoint.pid}/fd/{snapshot.endpoint.arena_fd}"
                    with Path(path).open("r+b", buffering=0) as memory:
                        memory.seek(DATA_OFFSET + 5)
                        byte = memory.read(1)[0]
                        memory.seek(DATA_OFFSET + 5)
                        memory.write(bytes([byte ^ 1]))
        super().act(message)


def test_a_copy_with_one_wrong_bit_is_never_loaded(chaos: Chaos, tmp_path: Path) -> None:
    """The newest copy, that of the rank ahead, fails its check and is quarantined; the step before
    is restored.
    """
    plan = {
        "spares": 0,
        "faults": [Kill(rank=0, at_step=8)],
        "options": one_ahead(tmp_path),
        "memory_copies": 2,
    }
    outcome = run(chaos, watch=CopyDamager("node0", kills=False), **plan)
    assert {record["source"] for record in journal(outcome, Event.QUARANTINED)} == {
        "memory of node0"
    }
    sources = {record["source"] for record in journal(outcome, Event.RESTORED)}
    assert "memory of node1" in sources
    assert "memory of node0" not in sources
    assert set(restored(outcome)) == {7}, outcome.directory


@pytest.mark.promise("the loss of every rank that has the state together with every copy of it")
def test_nothing_but_wrong_copies(chaos: Chaos, tmp_path: Path) -> None:
    """All copies are tried, none is loaded, and the run ends with the reason."""
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "steps": 20,
        "until": {"file": str(tmp_path / "never")},
    }
    plan |= {"options": {"step_s": 0.01}, "deadline_s": DEADLINE_S}
    outcome = chaos.run(JOB, twin=False, check=False, watch=CopyDamager(), **plan)
    reasons = (
        "every replica was lost",
        "could not be read from any rank that has it",
    )  # the first to be noticed
    assert any(reason in outcome.reasons[0] for reason in reasons), outcome.directory
    assert journal(outcome, Event.QUARANTINED)
    assert not journal(outcome, Event.RESTORED)


def test_without_copies_torn_arenas_are_the_end(chaos: Chaos, tmp_path: Path) -> None:
    options = torn(tmp_path, 2, 7) | {"step_s": 0.01}
    plan = {"nodes": 2, "spares": 1, "steps": STEPS, "deadline_s": DEADLINE_S, "memory_copies": 0}
    outcome = chaos.run(JOB, twin=False, check=False, options=options, **plan)
    assert "every replica was lost" in outcome.reasons[0], outcome.directory
    assert "no node a complete copy" in outcome.reasons[0]
    assert not journal(outcome, Event.RESTORED)


def test_without_copies_whole_arenas_are_enough(chaos: Chaos, tmp_path: Path) -> None:
    """The state is read from arenas alone.

    There is no spare, which might copy the state of a rank that has not been killed yet.
    """
    outcome = run(
        chaos, options=torn(tmp_path, 3, 7) | {"where": "forward"}, memory_copies=0, spares=0
    )
    assert set(restored(outcome)) == {7}, outcome.directory


# -- affordable copies -----------------------------------------------------------------------------

HEAVY = {"step_s": 0.002, "frozen_mb": 48}  # makes a copy cost at least a hundredth of ten steps
AFFORDABLE: dict[str, Any] = {"copies": "affordable", "steps": 40}


def interval_at(outcome: Outcome, generation: int) -> int:
    """Return the copy interval, in commits, at the end of ``generation``."""
    records = [
        record
        for record in journal(outcome, Event.COPY_INTERVAL)
        if record["generation"] == generation
    ]
    return int(records[-1]["every"])


def torn_at(outcome: Outcome) -> list[int]:
    """Return the committed steps of the ranks that ended in an update."""
    return [record["step"] for record in journal(outcome, Event.TORN)]


@pytest.mark.slow(nodes=3)
@pytest.mark.promise("at most k steps are computed again, with the same bits")
@pytest.mark.parametrize(("nodes", "spares"), [(2, 0), (3, 1)])
def test_every_rank_ends_in_one_update(
    chaos: Chaos, tmp_path: Path, nodes: int, spares: int
) -> None:
    """The steps since the newest copy are computed again, with the same bits."""
    options = torn(tmp_path, nodes, 24) | HEAVY
    outcome = run(
        chaos, most_lost=math.inf, nodes=nodes, spares=spares, options=options, **AFFORDABLE
    )
    assert torn_at(outcome) == nodes * [24]
    every = interval_at(outcome, 1)
    assert every > 1
    (step,) = set(restored(outcome))
    assert step > 24 - every
    assert outcome.lost_steps < every


@pytest.mark.promise(
    "the death of any rank or node loses no committed step, without any copy", where="forward"
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_every_rank_ends_outside_an_update(chaos: Chaos, tmp_path: Path, where: str) -> None:
    """No step is lost, however old the newest copy is: the arenas of the workers are whole."""
    options = torn(tmp_path, 3, 24) | HEAVY | {"where": where}
    outcome = run(chaos, spares=0, options=options, **AFFORDABLE)
    assert interval_at(outcome, 1) > 1
    assert torn_at(outcome) == []
    assert set(restored(outcome)) == {24}, outcome.directory


def test_one_rank_ends_in_its_update(chaos: Chaos, tmp_path: Path) -> None:
    """No step is lost, because the other ranks have the state."""
    options = torn(tmp_path, 1, 24) | HEAVY
    outcome = run(chaos, options=options, **AFFORDABLE)
    assert torn_at(outcome) == [24]
    assert restored(outcome) == []


def test_a_world_of_one_rank_is_copied_in_each_step(chaos: Chaos, tmp_path: Path) -> None:
    options = torn(tmp_path, 1, 24) | HEAVY
    outcome = run(chaos, nodes=1, spares=0, options=options, **AFFORDABLE)
    assert {record["every"] for record in journal(outcome, Event.COPY_INTERVAL)} == {1}
    assert set(restored(outcome)) == {24}, outcome.directory


@pytest.mark.promise(
    "Where one did not, or its node is lost and nothing is known of it, no step may be lost"
)
def test_steps_that_a_whole_state_would_have_saved_count_as_lost(
    chaos: Chaos, tmp_path: Path
) -> None:
    """Steps are lost if the only rank with a whole state is lost with its node.

    Ranks 1 and 2 end in their update, and rank 0 has left it: no torn state excuses the old copy.
    """
    options = {"fatal": {"5": [1, 2]}, "marker": str(tmp_path / "ended"), "ahead": 0} | HEAVY
    plan = {
        "nodes": 3,
        "spares": 0,
        "memory_copies": 2,
        "deadline_s": DEADLINE_S,
        "faults": [KillNode(rank=0, at_step=6)],
    }
    outcome = chaos.run(JOB, twin=False, check=False, options=options, **AFFORDABLE | plan)
    assert torn_at(outcome) == [5, 5], outcome.directory
    (step,) = set(restored(outcome))
    assert step < 5
    assert outcome.lost_steps > 0
    failed = [check.name for check in outcome.checks if check.verdict == Verdict.FAILED]
    assert "committed steps kept" in failed


# -- without a loss --------------------------------------------------------------------------------


class Descriptors(Killer):
    """A watcher that counts the memory files of the keepers while training goes on.

    It is done after the highest count was seen several times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    @property
    def is_done(self) -> bool:
        return self.counts.count(max(self.counts, default=0)) > 4 <= max(self.counts, default=0)

    def act(self, message: Any) -> None:
        if isinstance(message, Heartbeat) and self.plans and self.committed > 2:
            agents = {_parent(_parent(pid)) for pid in self.pids.values() if not is_ending(pid)}
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                below = [pid for agent in agents for pid in children(agent)]
                keepers = [pid for pid in below if process_name(pid) == process.NAME]
                links = [
                    link for keeper in keepers for link in Path(f"/proc/{keeper}/fd").iterdir()
                ]
                self.counts.append(
                    len(
                        {
                            link.stat().st_ino
                            for link in links
                            if "chaoskit-copy" in os.readlink(link)
                        }
                    )
                )


def test_two_nodes_keep_two_slots_each(chaos: Chaos, tmp_path: Path) -> None:
    watch = Descriptors()
    run_with_kills(chaos, tmp_path, watch, spares=0, memory_copies=2)
    assert max(watch.counts) == 4, watch.counts


# -- steps that were trained twice -----------------------------------------------------------------


def _commits(*lines: tuple[str, int, int]) -> list[Record]:
    """Return COMMIT records; each line gives worker, step and generation."""
    return [
        Record(
            t_ns,
            worker,
            Event.COMMIT,
            {"step": step, "generation": generation, "loss": 1.0, "grad_sum": 1.0},
        )
        for t_ns, (worker, step, generation) in enumerate(lines)
    ]


def test_of_what_only_lost_ranks_had_committed_the_last_step_was_in_flight() -> None:
    """A world that begins with a copy older than the step in flight has lost steps."""
    first = [("a", 0, 1), ("a", 1, 1), ("a", 2, 1)]
    assert History(_commits(*first, ("b", 3, 2))).repeated_steps() == 0
    assert History(_commits(*first, ("b", 2, 2), ("b", 3, 2))).repeated_steps() == 0
    assert History(_commits(*first, ("b", 1, 2), ("b", 2, 2))).repeated_steps() == 1
    assert History(_commits(*first, ("b", 0, 2), ("b", 1, 3), ("b", 2, 3))).repeated_steps() == 2
    assert History(_commits(*first, ("b", 2, 2), ("b", 3, 2), ("c", 3, 3))).repeated_steps() == 0
    assert History(_commits(*first, ("a", 2, 2))).repeated_steps() == 1
