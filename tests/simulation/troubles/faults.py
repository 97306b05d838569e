"""The faults of a history, drawn from its seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chaoskit.vocabulary import Phase
from simulation.network import COORDINATOR
from simulation.processes.node import Agent
from simulation.processes.replicas import Doom

if TYPE_CHECKING:
    from simulation.processes.worker import Worker
    from simulation.world import World

#: Time by which the training of a history without faults is over, most of the time.
_WINDOW_S = 1.6
_PHASES = (Phase.FORWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.RESTORE, Phase.REGROUP, Phase.DONE)
_SLOW_S = (0.001, 0.15)  # well below the lease


class Faults:
    """A few faults, each at a time, in a phase, or when a rank heals another.

    Attributes:
        done: the faults that struck, a line each.
        last_s: no fault strikes or ends later than this.
    """

    def __init__(self, world: World) -> None:
        self._world, self._random = world, world.engine.random
        self.done: list[str] = []
        self.last_s = 0.0
        self._waiting: list[Callable[[Worker], None]] = []
        self._on_heal: list[Callable[[Worker, Worker], None]] = []
        self._cursed: set[str] = set()
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self._kill, 6),
            (self._kill_several, 3),
            (self._hang, 4),
            (self._stop, 1),
            (self._raise, 1),
            (self._kill_node, 3),
            (self._freeze_node, 4),
            (self._cut, 3),
            (self._partition, 4),
            (self._isolate_coordinator, 2),
            (self._split, 3),
            (self._slow, 2),
            (self._kill_coordinator, 4),
            (self._doom_coordinator, 8),
            (self._freeze_coordinator, 2),
            (self._usurp, 2),
            (self._lose_record, 1),
            (self._fail_starts, 2),
            (self._curse, 1),
        ]
        if world.kind == "sharded":
            self._kinds += [(self._corrupt, 4), (self._differ, 1)]
        elif world.kind == "replicated":
            self._kinds += [(self._rebalance, 6)]
        else:  # a lost node takes its copies with it: a doom alone is expected to lose nodes
            lossless = (
                self._kill,
                self._kill_several,
                self._hang,
                self._stop,
                self._raise,
                self._kill_coordinator,
            )
            self._kinds = [(act, 3 if act in lossless[:3] else 1) for act in lossless] + [
                (self._doom, 8)
            ]

    def schedule(self) -> None:
        """Draw the faults of this history."""
        world, random = self._world, self._random
        world.reached, world.healing = self._reached, self._healing  # type: ignore[method-assign]
        world.carry_out = self._carry_out  # type: ignore[method-assign]
        if random.random() < 0.08 or world.kind == "kept":
            world.haven = ""
        if random.random() < 0.03:
            self._at(random.uniform(0.0, _WINDOW_S), self._stop_run)
        acts, weights = zip(*self._kinds, strict=True)
        for act in random.choices(acts, weights, k=random.randint(1, 5)):
            drawn = random.random()
            if drawn < 0.65:
                self._at(random.uniform(0.0, _WINDOW_S), act)
            elif drawn < 0.9:
                self._at(random.uniform(0.0, _WINDOW_S), self._watch, random.choice(_PHASES), act)
            else:
                self._on_heal.append(
                    lambda worker, healer, act=act: self._strike_healer(healer, act)
                )
        if world.kind == "kept":
            self._at(random.uniform(0.6, _WINDOW_S), self._doom)
        elif not world.haven and random.random() < 0.5:
            self._at(random.uniform(0.5, _WINDOW_S), self._kill_everybody)

    def _at(self, time_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._world.engine.after(time_s, act, *arguments)
        self._until(time_s)

    def _until(self, time_s: float) -> None:
        self.last_s = max(self.last_s, time_s)

    # -- moments -----------------------------------------------------------------------------------

    def _watch(self, phase: Phase, act: Callable[[], None]) -> None:
        """Strike when the next worker enters ``phase``, at once or a little later."""
        self._world.watched_phase = int(phase)
        self._waiting.append(lambda worker: self._soon(act))

    def _reached(self, worker: Worker) -> None:
        if self._waiting:
            self._waiting.pop()(worker)
        if not self._waiting:
            self._world.watched_phase = -1

    def _healing(self, worker: Worker, healer: Worker) -> None:
        if self._on_heal:
            self._on_heal.pop()(worker, healer)

    def _strike_healer(self, healer: Worker, act: Callable[[], None]) -> None:
        if self._random.random() < 0.7 and healer in self._victims():
            self._world.engine.after(self._random.uniform(0.0, 0.03), self._kill_one, healer)
        else:
            self._soon(act)

    def _soon(self, act: Callable[[], None]) -> None:
        self._at_now(self._random.choice((1e-6, self._random.uniform(0.0, 0.02))), act)

    def _at_now(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._world.engine.after(delay_s, act, *arguments)
        self._until(self._world.engine.now_s + delay_s)

    def _note(self, what: str) -> None:
        engine = self._world.engine
        self.done.append(f"{engine.now_s:.4f} {what}")
        engine.note(f"FAULT {what}")
        self._until(engine.now_s)

    # -- targets -----------------------------------------------------------------------------------

    def _victims(self) -> list[Worker]:
        world = self._world
        return [
            worker
            for worker in world.workers.values()
            if worker.alive and worker.agent.node != world.haven and not worker.agent.over
        ]

    def _nodes(self) -> list[str]:
        world = self._world
        return [
            node
            for node, agent in world.agents.items()
            if node != world.haven and agent.alive and not agent.over
        ]

    def _victim(self) -> Worker | None:
        victims = self._victims()
        return self._random.choice(victims) if victims else None

    def _node(self) -> Agent | None:
        nodes = self._nodes()
        return self._world.agents[self._random.choice(nodes)] if nodes else None

    # -- workers -----------------------------------------------------------------------------------

    def _kill_one(self, worker: Worker) -> None:
        if worker.alive:
            self._note(f"kill {worker.name}")
            worker.kill()

    def _doom(self) -> None:
        """End all ranks of a world in the next update, or all but one, which loses its node."""
        if self._world.doom is None or self._world.doom.over:
            self._world.doom = Doom(spared=int(self._random.random() < 0.3))

    def _carry_out(self, doom: Doom) -> None:
        world = self._world
        self._note(
            f"{len(doom.victims)} ranks end in the update of step {doom.step}, {doom.spared} outside"
        )
        for name in doom.others:
            agent = world.workers[name].agent
            world.laws.bereft = True
            world.laws.excused_nodes.add(agent.node)
            agent.kill()
        for name in doom.victims:
            world.workers[name].kill()

    def _kill(self) -> None:
        worker = self._victim()
        if worker is not None:
            self._kill_one(worker)

    def _kill_several(self) -> None:
        victims = self._victims()
        for worker in self._random.sample(
            victims, self._random.randint(min(2, len(victims)), len(victims))
        ):
            self._at_now(
                self._random.choice((0.0, self._random.uniform(0.0, 0.01))), self._kill_one, worker
            )

    def _kill_everybody(self) -> None:
        for worker in tuple(self._world.workers.values()):
            self._kill_one(worker)

    def _hang(self) -> None:
        worker = self._victim()
        if worker is not None and not worker.hung and not worker.over:
            self._note(f"hang {worker.name}")
            worker.hang(deaf=self._random.random() < 0.4)

    def _stop(self) -> None:
        worker = self._victim()
        if worker is not None and not worker.agent.frozen:
            self._note(f"stop {worker.name}")
            self._world.laws.excused.add(worker.name)
            worker.freeze()
            worker.agent.after(0.001, worker.agent.notice_stop, worker)

    def _raise(self) -> None:
        worker = self._victim()
        if worker is not None and not worker.hung and not worker.over and not worker.frozen:
            self._note(f"raise in {worker.name}")
            worker.fail(f"RuntimeError: {self._random.random()}")

    def _fail_starts(self) -> None:
        agent = self._node()
        if agent is not None:
            count = self._random.randint(1, 3)
            self._note(f"{count} starts on {agent.node} fail")
            self._world.barren[agent.node] = self._world.barren.get(agent.node, 0) + count

    def _curse(self) -> None:
        """Let a node end all its workers, for a while or for good."""
        agent = self._node()
        if agent is not None:
            self._note(f"curse {agent.node}")
            self._cursed.add(agent.node)
            self._haunt(agent.node)
            if self._random.random() < 0.7:
                self._at_now(self._random.uniform(0.5, 4.0), self._lift, agent.node)

    def _lift(self, node: str) -> None:
        self._note(f"{node} is well again")
        self._cursed.discard(node)

    def _haunt(self, node: str) -> None:
        if node not in self._cursed:
            return
        for worker in self._victims():
            if worker.agent.node == node:
                self._world.barren.setdefault(node, 0)
                worker.kill()
        self._world.engine.after(self._random.uniform(0.1, 0.9), self._haunt, node)

    def _differ(self) -> None:
        """Let workers that a node starts, for a while, compute other numbers than the rest."""
        agent = self._node()
        if agent is not None:
            self._note(f"other software on {agent.node}")
            self._world.different.add(agent.node)
            self._world.laws.excused_nodes.update(
                self._world.agents
            )  # the numbers of the first worker count
            self._world.barren.setdefault(agent.node, 0)
            self._at_now(self._random.uniform(0.5, 4.0), self._world.different.discard, agent.node)

    def _corrupt(self) -> None:
        """Flip a bit of a copy."""
        agents = [agent for agent in self._world.agents.values() if agent.alive]
        copies = [(agent.node, copy) for agent in agents for _, copy in agent.kept.all()]
        if copies:
            node, copy = self._random.choice(copies)
            self._note(f"corrupt piece {copy.piece} of step {copy.step} on {node}")
            copy.corrupt = True

    # -- nodes -------------------------------------------------------------------------------------

    def _kill_node(self) -> None:
        agent = self._node()
        if agent is not None:
            self._note(f"kill {agent.name}")
            self._world.laws.excused_nodes.add(agent.node)
            agent.kill()
            if self._random.random() < 0.5:
                self._at_now(self._random.uniform(0.05, 2.0), self._boot, agent)

    def _boot(self, former: Agent) -> None:
        world = self._world
        if world.agents[former.node] is former and not world.over():
            agent = Agent(world, former.node, former.pid // 1000)
            self._note(f"boot {agent.name}")
            world.agents[former.node] = agent

    def _freeze_node(self) -> None:
        agent = self._node()
        if agent is None or agent.frozen:
            return
        for_s = self._random.choice((0.3, 1.0, 2.5))
        self._note(f"freeze {agent.node} for {for_s} s")
        self._world.laws.excused_nodes.add(agent.node)
        frozen = self._world.on_node(agent.node)
        for process in frozen:
            process.freeze()
        self._random.shuffle(frozen)
        for process in frozen:
            self._at_now(for_s + self._random.uniform(0.0, 0.05), process.thaw)

    def _cut(self) -> None:
        agent = self._node()
        if agent is not None and agent.line is not None:
            self._note(f"cut the connection of {agent.node}")
            self._world.laws.excused_nodes.add(agent.node)
            agent.line.cut()

    def _partition(self) -> None:
        """Cut some nodes off from the coordinator, and mostly from the other nodes, too."""
        world, random, nodes = self._world, self._random, self._nodes()
        if not nodes:
            return
        near = set(random.sample(nodes, random.randint(1, len(nodes))))
        far = {COORDINATOR} if random.random() < 0.3 else {*world.agents, COORDINATOR} - near
        out = {(site, other) for site in near for other in far}
        into = {(other, site) for site, other in out}
        ways = random.choice((out | into, out | into, out, into))
        self._note(f"part {sorted(near)} from {sorted(far)}{'' if ways > out else ', one way'}")
        world.laws.excused_nodes |= near
        self._sever(ways, random.choice((0.3, 1.0, 2.5, 5.0)))

    def _split(self) -> None:
        """Cut some nodes off from some others, while the coordinator reaches them all."""
        world, random = self._world, self._random
        nodes = list(world.agents)
        near = set(random.sample(nodes, random.randint(1, len(nodes) - 1)))
        far = set(
            random.sample(sorted(set(nodes) - near), random.randint(1, len(nodes) - len(near)))
        )
        ways = {(node, other) for node in near for other in far}
        if random.random() < 0.8:
            ways |= {(other, node) for node, other in ways}
        self._note(f"split {sorted(near)} from {sorted(far)}")
        self._sever(ways, random.choice((0.3, 1.0, 2.5, 5.0)))

    def _isolate_coordinator(self) -> None:
        """Cut the coordinator off. No node is to blame, and none may be given up."""
        if not self._world.laws.plans:  # nodes that wait for the start may come again
            self._at_now(0.3, self._isolate_coordinator)
            return
        for_s = self._random.choice((0.3, 1.0, 2.5, 5.0))
        self._note(f"the coordinator is cut off for {for_s} s")
        nodes = self._world.agents
        if self._world.latency_s:
            self._world.laws.excused_nodes.update(nodes)  # some stay in contact for longer
        self._sever(
            {(COORDINATOR, node) for node in nodes} | {(node, COORDINATOR) for node in nodes}, for_s
        )

    def _sever(self, ways: set[tuple[str, str]], for_s: float) -> None:
        self._world.sever(ways)
        if any(
            COORDINATOR in way for way in ways
        ):  # a slow node's lease ends before those of the others
            self._world.laws.excused_nodes |= {
                node for node, agent in self._world.agents.items() if agent.frozen
            }
        self._world.laws.parted |= {site for way in ways if COORDINATOR not in way for site in way}
        self._at_now(for_s, self._heal, ways)

    def _heal(self, ways: set[tuple[str, str]]) -> None:
        self._world.heal(ways)
        self._note(
            "a part of the network heals" if self._world.severed else "the network is whole again"
        )
        for agent in self._world.agents.values():
            agent.quiet_since_s = self._world.engine.now_s

    def _slow(self) -> None:
        """Slow the links of a node. It may be the haven: a slow node is not lost."""
        node = self._random.choice(list(self._world.agents))
        self._note(f"slow links of {node}")
        if self._world.severed:  # it comes back later than the others
            self._world.laws.excused_nodes.add(node)
        self._world.latency_s[node] = _SLOW_S
        line = self._world.agents[node].line
        if line is not None:
            line.latency_s = _SLOW_S

    # -- coordinators ------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        coordinator = self._world.coordinator
        self._note("one rank is faster than the others")
        coordinator.after(0.0, coordinator.rebalance, self._random.randrange(4))

    def _kill_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive:
            self._note(f"kill {coordinator.name}")
            coordinator.kill()

    def _doom_coordinator(self) -> None:
        """End the coordinator amid its next decisions, and perhaps its successor, too."""
        coordinator = self._world.coordinator
        if coordinator.alive and coordinator.acts_left is None:
            coordinator.acts_left = self._random.randint(0, 14)
            self._note(f"{coordinator.name} ends after {coordinator.acts_left} acts")
            coordinator.ends.append(lambda: self._until(self._world.engine.now_s))
            if self._random.random() < 0.3:
                coordinator.ends.append(lambda: self._at_now(0.5, self._doom_coordinator))

    def _freeze_coordinator(self) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive and not coordinator.frozen:
            for_s = self._random.choice((0.1, 0.6, 1.5))
            self._note(f"freeze {coordinator.name} for {for_s} s")
            coordinator.freeze()
            self._at_now(for_s, coordinator.thaw)

    def _usurp(self) -> None:
        """Freeze a coordinator until after it is taken for dead and replaced."""
        world, sleeper = self._world, self._world.coordinator
        if not sleeper.alive or sleeper.frozen:
            return
        self._note(f"{sleeper.name} falls asleep")
        sleeper.freeze()
        for agent in world.agents.values():
            if agent.line is not None:
                agent.line.cut()
        self._at_now(self._random.uniform(0.01, 0.3), self._succeed, sleeper)
        self._at_now(self._random.uniform(0.3, 2.5), sleeper.thaw)

    def _lose_record(self) -> None:
        """Lose the log, unless the job has ended: it is of no use then."""
        if self._world.laws.end is None and not self._world.coordinator.plane.ended:
            self._note("the log is lost")
            self._world.log.lose()

    def _succeed(self, sleeper: object) -> None:
        if self._world.coordinator is sleeper:
            self._world.launch_coordinator()

    def _stop_run(self) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive and not coordinator.frozen and self._world.laws.end is None:
            self._note("an observer ends the run")
            self._world.stopped = "enough"
            coordinator.stop_run("enough")
