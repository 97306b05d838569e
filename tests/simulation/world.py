"""One cluster in one history."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.wire.messages import Plan
from simulation.engine import Engine, Process
from simulation.laws.history_laws import Laws
from simulation.laws.replica_laws import ReplicaLaws
from simulation.laws.sharded_laws import ShardedLaws
from simulation.mesh import Mesh
from simulation.network import COORDINATOR, Line
from simulation.processes.coordinator import Coordinator, Record
from simulation.processes.node import Agent
from simulation.processes.pieces import PieceKeeper
from simulation.processes.replicas import Doom, ReplicaKeeper, ReplicaWorker
from simulation.processes.sharded import ShardedWorker
from simulation.processes.worker import Worker
from simulation.seams import SOUND, Seams
from simulation.troubles.resizes import follow_for, policy_for

#: A job must be over so long after the last fault: the start of replacements that hang, leases, detectors one after
#: the other, pauses between starts that fail.
PATIENCE_S = 60.0
NORMAL_S = (0.0002, 0.004)
#: Where copies are restored, one that hangs must be noticed sooner; of replicas also a node that is silent, whose lease
#: is ``coordinator_outage_s``: the limit counts from the loss of the state, without a break.
_STARTUP_S = {"replicated": 4.0, "sharded": 10.0, "kept": 15.0}

#: Of jobs: replicas, of which nothing outlives its worker; pieces; and replicas whose states are kept on their nodes.
Kind = Literal["replicated", "sharded", "kept"]


class World:
    """Processes, the network between them, and what is drawn from the seed.

    Attributes:
        haven: the node that no fault strikes, so that the state survives; "" where everybody may die.
        barren: nodes on which a start has failed.
        names: node -> the number of its next worker.
    """

    def __init__(self, seed: int, kind: Kind = "replicated", *, seams: Seams = SOUND) -> None:
        self.engine, self.kind, self.seams = Engine(seed), kind, seams
        self.sharded = sharded = kind == "sharded"
        random = self.engine.random
        nodes = random.randint(2, 4)
        self.config = RunConfig(
            job=JobSpec("job.py", sharded=sharded),
            nodes=nodes,
            spares=random.choice((0, 0, 1, 1, 2)),
            min_world=random.choice((1, 1, 1, 2)),
            shards=nodes + random.randint(0, 3),
            heartbeat_ms=250,
            hang_floor_ms=400,
            strikes_max=5,
            startup_s=_STARTUP_S[kind],
            coordinator_outage_s=2.0 if seed % 8 == 0 else 10.0,  # shorter than some partitions
            outside_limit_s=5.0,
            collective_timeout_s=5.0,  # limits user code in a world of one
            replacement_s=random.choice((0.0, 0.5, 3.0)) if sharded else 0.0,
        )
        self.doom: Doom | None = None  # of a kept job
        self.copy_cost = (
            random.choice((0.1, 1.0, 5.0)) if kind == "kept" else 0.0
        )  # CPU time in the time of a copy
        if kind == "kept":
            self.config = msgspec.structs.replace(
                self.config, memory_copies=random.choice((1, 1, 2))
            )
        elif (elastic := policy_for(seed, nodes, sharded=sharded)) is not None:
            follow = {} if sharded else follow_for(seed, nodes)
            self.config = msgspec.structs.replace(
                self.config, elastic=elastic, min_world=1, **follow
            )
        self.steps = random.randint(6, 12)
        self.shard_s = (0.01, 0.05)
        self.patience_s = PATIENCE_S
        self.laws: Any = {"replicated": Laws, "sharded": ShardedLaws, "kept": ReplicaLaws}[kind](
            self
        )
        self.record = Record()
        self.workers: dict[str, Worker] = {}
        self._meshes: dict[tuple[str, ...], Mesh] = {}
        self.haven = f"n{random.randrange(nodes)}"
        self.barren: dict[str, int] = {}  # node -> starts that are still to fail
        self.names: dict[str, int] = {}
        self.different: set[str] = set()  # nodes with other software
        self.stopped = ""  # the reason that an observer gave
        self.latency_s: dict[str, tuple[float, float]] = {}  # of slow nodes
        self.severed: Counter[tuple[str, str]] = (
            Counter()
        )  # from a site to another one: by so many faults
        self.healed_s = 0.0
        self._lines: list[Line] = []
        self.watched_phase = -1
        self.coordinators = 0
        self.coordinator: Coordinator
        self.launch_coordinator()
        self.agents = {f"n{index}": Agent(self, f"n{index}", 0) for index in range(nodes)}

    def over(self) -> bool:
        """Whether the coordinator of the moment has ended the job."""
        return self.coordinator.over

    # -- coordinators ---------------------------------------------------------------------------------------------

    def launch_coordinator(self) -> None:
        """``supervisor._restart_coordinators``."""
        self.coordinator = coordinator = Coordinator(self)
        self.coordinators += 1
        coordinator.ends.append(lambda: self._coordinator_ended(coordinator))
        self.engine.note(f"{coordinator.name} begins")

    def _coordinator_ended(self, ended: Coordinator) -> None:
        if ended is self.coordinator and not ended.over:
            self.engine.after(self.engine.uniform(0.02, 0.4), self._replace, ended)

    def _replace(self, ended: Coordinator) -> None:
        if ended is self.coordinator:
            self.launch_coordinator()

    def connect(self, client: Agent | Worker) -> Line | None:
        """A connection to whoever listens; None if nobody does."""
        if not self.coordinator.alive:
            return None
        node = client.node if isinstance(client, Agent) else client.agent.node
        ways = ((COORDINATOR, node), (node, COORDINATOR))
        if any(way in self.severed for way in ways):
            return None  # a real attempt waits, and a later one is made beside it
        latency_s = self.latency_s.get(node, NORMAL_S)
        line = Line(
            self.engine, client, self.coordinator, latency_s, lambda to: ways[to] in self.severed
        )
        self._lines.append(line)
        self.coordinator.serve(line)
        return line

    # -- the network ----------------------------------------------------------------------------------------------

    def sever(self, ways: set[tuple[str, str]]) -> None:
        """Nothing comes through these ways any more, and nobody is told."""
        self.severed.update(ways)

    def heal(self, ways: set[tuple[str, str]]) -> None:
        """What was sent meanwhile is sent again."""
        self.severed -= Counter(ways)
        self.healed_s = self.engine.now_s
        for line in self._lines:
            line.release()
        for mesh in self._meshes.values():
            mesh.release()
        for worker in self.workers.values():
            worker.run(worker.notify)

    def apart(self, one: str, other: str) -> bool:
        """Whether two sites cannot speak to each other."""
        return (one, other) in self.severed or (other, one) in self.severed

    # -- workers --------------------------------------------------------------------------------------------------

    def new_worker(self, agent: Agent, name: str) -> Worker:
        """The process of a worker, of the kind that this job has."""
        return {"replicated": Worker, "sharded": ShardedWorker, "kept": ReplicaWorker}[self.kind](
            self, agent, name
        )

    def new_keeper(self, agent: Agent) -> PieceKeeper | ReplicaKeeper:
        """What keeps the states of a node's workers, of the kind that this job has."""
        return ReplicaKeeper(agent) if self.kind == "kept" else PieceKeeper(agent)

    def fingerprint_of(self, worker: Worker) -> str:
        """What the numbers of a worker depend on: another on a node with other software."""
        return "torch 1, other" if worker.agent.node in self.different else "torch 1"

    def mesh(self, plan: Plan) -> Mesh:
        """The group of ``plan``."""
        key = (str(plan.generation), *(member.worker for member in plan.members))
        if key not in self._meshes:
            self._meshes[key] = Mesh(self, plan)
        return self._meshes[key]

    def fails_to_start(self, worker: Worker) -> bool:
        """Whether ``worker`` ends before it is ready."""
        left = self.barren.get(worker.agent.node, 0)
        if left <= 0:
            return False
        self.barren[worker.agent.node] = left - 1
        return True

    def on_node(self, node: str) -> list[Process]:
        """The agent of ``node``, its keeper where that is a process of the model, and its workers."""
        agent = self.agents[node]
        keeper = [agent.kept] if isinstance(agent.kept, Process) else []
        return [agent, *keeper, *(charge.process for charge in agent.charges.values())]

    # -- what faults wait for; see faults.py ----------------------------------------------------------------------

    def reached(self, worker: Worker) -> None:
        """``worker`` entered the phase that is watched."""

    def carry_out(self, doom: Doom) -> None:
        """All ranks that are to end in one update stand there."""

    def healing(self, worker: Worker, healer: Worker) -> None:
        """``worker`` begins to copy the state of ``healer``."""
