"""The cluster of a history."""

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
from simulation.processes.coordinator import Coordinator, Log
from simulation.processes.node import Agent
from simulation.processes.pieces import PieceKeeper
from simulation.processes.replicas import Doom, ReplicaKeeper, ReplicaWorker
from simulation.processes.sharded import ShardedWorker
from simulation.processes.worker import Worker
from simulation.seams import SOUND, Seams
from simulation.troubles.resizes import follow_for, policy_for

#: Time within which a job must be over after the last fault. It covers starts of replacements that
#: hang, leases, detectors one after the other, and pauses between starts that fail.
PATIENCE_S = 60.0
NORMAL_S = (0.0002, 0.004)
#: A hang must be noticed sooner than this while copies are restored; so must the silence of a node
#: that keeps replicas, which has a lease of ``coordinator_outage_s``. The limit counts from the
#: loss of the state, without a break.
_STARTUP_S = {"replicated": 4.0, "sharded": 10.0, "kept": 15.0}

#: The kinds of jobs: replicas of which nothing outlives its worker ("replicated"), pieces of a
#: state ("sharded"), and replicas of which the nodes keep the states ("kept").
Kind = Literal["replicated", "sharded", "kept"]


class World:
    """The processes, the network between them, and the values that are drawn from the seed.

    Attributes:
        haven: the node that no fault strikes, so that the state survives; "" if any node may die.
        barren: node -> the number of starts that are still to fail on it.
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
        self.doom: Doom | None = None  # only for a kept job
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
        self.log = Log()
        self.workers: dict[str, Worker] = {}
        self._meshes: dict[tuple[str, ...], Mesh] = {}
        self.haven = f"n{random.randrange(nodes)}"
        self.barren: dict[str, int] = {}  # node -> starts that are still to fail
        self.names: dict[str, int] = {}
        self.different: set[str] = set()  # nodes with other software
        self.stopped = ""  # the reason with which an observer ended the run
        self.latency_s: dict[str, tuple[float, float]] = {}  # of slow nodes
        self.severed: Counter[tuple[str, str]] = (
            Counter()
        )  # (site, other site) -> number of faults that sever this way
        self.healed_s = 0.0
        self._lines: list[Line] = []
        self.watched_phase = -1
        self.coordinators = 0
        self.coordinator: Coordinator
        self.launch_coordinator()
        self.agents = {f"n{index}": Agent(self, f"n{index}", 0) for index in range(nodes)}

    def over(self) -> bool:
        """Return whether the current coordinator has ended the job."""
        return self.coordinator.over

    # -- coordinators ------------------------------------------------------------------------------

    def launch_coordinator(self) -> None:
        """Start a coordinator, like ``supervisor._restart_coordinators``."""
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
        """Return a connection to the current coordinator, or None if it cannot be reached."""
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

    # -- the network -------------------------------------------------------------------------------

    def sever(self, ways: set[tuple[str, str]]) -> None:
        """Let nothing through on these ways. No process is notified."""
        self.severed.update(ways)

    def heal(self, ways: set[tuple[str, str]]) -> None:
        """Let messages through again, those that were sent meanwhile, too."""
        self.severed -= Counter(ways)
        self.healed_s = self.engine.now_s
        for line in self._lines:
            line.release()
        for mesh in self._meshes.values():
            mesh.release()
        for worker in self.workers.values():
            worker.run(worker.notify)

    def apart(self, site: str, other: str) -> bool:
        """Return whether two sites cannot communicate, in one direction or both."""
        return (site, other) in self.severed or (other, site) in self.severed

    # -- workers -----------------------------------------------------------------------------------

    def new_worker(self, agent: Agent, name: str) -> Worker:
        """Return a new worker process for this kind of job."""
        return {"replicated": Worker, "sharded": ShardedWorker, "kept": ReplicaWorker}[self.kind](
            self, agent, name
        )

    def new_keeper(self, agent: Agent) -> PieceKeeper | ReplicaKeeper:
        """Return a new keeper of the states of a node's workers, for this kind of job."""
        return ReplicaKeeper(agent) if self.kind == "kept" else PieceKeeper(agent)

    def fingerprint_of(self, worker: Worker) -> str:
        """Return a worker's software fingerprint, which differs on a node with other software."""
        return "torch 1, other" if worker.agent.node in self.different else "torch 1"

    def mesh(self, plan: Plan) -> Mesh:
        """Return the process group of ``plan``."""
        key = (str(plan.generation), *(member.worker for member in plan.members))
        if key not in self._meshes:
            self._meshes[key] = Mesh(self, plan)
        return self._meshes[key]

    def fails_to_start(self, worker: Worker) -> bool:
        """Return whether ``worker`` ends before it is ready, and count that start."""
        left = self.barren.get(worker.agent.node, 0)
        if left <= 0:
            return False
        self.barren[worker.agent.node] = left - 1
        return True

    def on_node(self, node: str) -> list[Process]:
        """Return the agent of ``node``, its keeper if it is a process, and its workers."""
        agent = self.agents[node]
        keeper = [agent.kept] if isinstance(agent.kept, Process) else []
        return [agent, *keeper, *(charge.process for charge in agent.charges.values())]

    # -- moments that faults wait for; see faults.py
    # ----------------------------------------------------------------

    def reached(self, worker: Worker) -> None:
        """Called when ``worker`` enters the watched phase."""

    def carry_out(self, doom: Doom) -> None:
        """Called when all ranks that are to end in one update are in it."""

    def healing(self, worker: Worker, healer: Worker) -> None:
        """Called when ``worker`` begins to copy the state of ``healer``."""
