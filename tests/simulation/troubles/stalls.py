"""Agents that are slow or stopped, and machines that are paused; drawn from a stream of their own, as resizes are."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.engine import Process
    from simulation.processes.node import Agent
    from simulation.troubles.faults import Faults
    from simulation.world import World

_WINDOW_S = 1.6
_SHARE = 0.4  # of the histories
#: With a beat before it and slow links beside it, less than the silence that an agent is allowed while its kernel
#: acknowledges, and more than a lease at times.
_SLOW_S = (0.3, 0.6)
_LONG_S = (1.5, 2.5, math.inf)
_PAUSES_S = (0.3, 1.0, 2.5)


class Stalls:
    """Silences of nodes that do not end a connection."""

    def __init__(self, world: World, seed: int, faults: Faults) -> None:
        self._world, self._faults, self._random = world, faults, Random(f"{seed}/stalls")

    def schedule(self) -> None:
        """Draw the stalls of this history."""
        random = self._random
        if random.random() > _SHARE:
            return
        for _ in range(random.randint(1, 2)):
            act = random.choice(
                (self._slow_agent, self._slow_agent, self._stop_agent, self._pause_machine)
            )
            time_s = random.uniform(0.0, _WINDOW_S)
            self._world.engine.after(time_s, act)
            self._until(time_s)

    def _until(self, time_s: float) -> None:
        self._faults.last_s = max(self._faults.last_s, time_s)

    def _note(self, what: str) -> None:
        engine = self._world.engine
        self._faults.done.append(f"{engine.now_s:.4f} {what}")
        engine.note(f"FAULT {what}")

    def _agent(self, *, any_node: bool = False) -> Agent | None:
        agents = [
            agent
            for node, agent in self._world.agents.items()
            if agent.alive
            and not agent.over
            and not agent.frozen
            and (any_node or node != self._world.haven)
        ]
        return self._random.choice(agents) if agents else None

    def _slow_agent(self) -> None:
        """Silence an agent for a while.

        Its ranks train and its kernel acknowledges: it must not be given up.
        """
        agent, for_s = self._agent(any_node=True), self._random.choice(_SLOW_S)
        if agent is None:
            return
        self._note(f"the agent of {agent.node} is slow for {for_s} s")
        if self._world.severed:
            self._world.laws.excused_nodes.add(agent.node)
        self._hold(agent, for_s)

    def _stop_agent(self) -> None:
        """Stop an agent for longer than is allowed, or for good."""
        agent, for_s = self._agent(), self._random.choice(_LONG_S)
        if agent is None:
            return
        self._note(f"the agent of {agent.node} is stopped for {for_s} s")
        self._world.laws.excused_nodes.add(agent.node)
        self._hold(agent, for_s)

    def _hold(self, agent: Agent, for_s: float) -> None:
        agent.freeze()
        if for_s < math.inf:
            self._world.engine.after(for_s, agent.thaw)
            self._until(self._world.engine.now_s + for_s)

    def _pause_machine(self) -> None:
        """Let a whole node stand still: its kernel acknowledges nothing."""
        agent, for_s = self._agent(), self._random.choice(_PAUSES_S)
        if agent is None:
            return
        self._note(f"the machine of {agent.node} is paused for {for_s} s")
        self._world.laws.excused_nodes.add(agent.node)
        agent.paused = True
        stands = [process for process in self._world.on_node(agent.node) if not process.frozen]
        for process in stands:
            process.freeze()
        self._until(self._world.engine.now_s + for_s)
        self._world.engine.after(for_s, self._go_on, agent, stands)

    def _go_on(self, agent: Agent, stands: list[Process]) -> None:
        agent.paused = False
        for process in stands:
            process.thaw()
