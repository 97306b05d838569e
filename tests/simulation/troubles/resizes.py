"""Requests for other sizes, drawn from a random stream of their own."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from chaoskit.config import BatchScaling
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.wire.messages import (
    LendNodes,
    Message,
    NoticeCancelled,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
)

if TYPE_CHECKING:
    from simulation.troubles.faults import Faults
    from simulation.world import World

_WINDOW_S = 1.6


def policy_for(seed: int, nodes: int, *, sharded: bool) -> ElasticPolicy | None:
    """Return the elastic policy of a history, or None.

    Every second history of a replicated job has one, and every fifth of a sharded job.
    """
    if seed % 10 not in ((2, 7) if sharded else (1, 3, 5, 7, 9)):
        return None
    random = Random(f"{seed}/policy")
    return ElasticPolicy(
        min_replicas=random.randint(1, min(2, nodes)),
        max_replicas=nodes,
        graceful_shutdown_timeout_s=random.choice((0.2, 2.0, 10.0)),
        scaling_timeout_s=random.choice((0.0, 0.2)),
        faulty_scale_down_timeout_s=random.choice((0.0, 0.3, 2.0)),
        scale_up_snooze_time_s=random.choice((0.0, 0.0, 0.3)),
    )


def follow_for(seed: int, nodes: int) -> dict[str, Any]:
    """Return the settings for a batch that follows the world, in a third of the histories."""
    random = Random(f"{seed}/follow")
    return (
        {"follow": BatchScaling(rule="none"), "shards": nodes * random.randint(1, 2)}
        if random.random() < 1 / 3
        else {}
    )


class Resizes:
    """Requests, notices and demands during one history."""

    def __init__(self, world: World, seed: int, faults: Faults) -> None:
        self._world, self._faults, self._random = world, faults, Random(f"{seed}/resizes")
        self._second_thoughts = Random(f"{seed}/cancelled")

    def schedule(self) -> None:
        """Draw the requests of this history."""
        policy, random = self._world.config.elastic, self._random
        if policy is None:
            return
        for number in range(random.randint(1, 5)):
            time_s, drawn = random.uniform(0.3, _WINDOW_S), random.random()
            if drawn < 0.6:
                message: Message = ScaleTo(f"r{number}", random.choice(policy.sizes))
                self._at(time_s, message)
            elif drawn < 0.8:
                self._at(
                    time_s,
                    LendNodes(
                        f"r{number}", f"j{number}", random.randint(1, 2), random.choice((0.1, 1.0))
                    ),
                )
                self._at(time_s + random.uniform(0.0, 1.0), ReturnNodes(f"j{number}"))
            else:
                node, grace_s = (
                    random.choice(list(self._world.agents)),
                    random.choice((0.1, 0.5, 2.0)),
                )
                self._at(time_s, SpotNotice(node, grace_s))
                if self._second_thoughts.random() < 0.4:
                    self._at(
                        time_s + self._second_thoughts.uniform(0.0, grace_s), NoticeCancelled(node)
                    )
                elif node != self._world.haven:
                    self._world.engine.after(time_s + grace_s, self._take, node)
                    self._faults.last_s = max(self._faults.last_s, time_s + grace_s)

    def _at(self, time_s: float, message: Message) -> None:
        self._world.engine.after(time_s, self._ask, message)
        self._faults.last_s = max(self._faults.last_s, time_s)

    def _ask(self, message: Message) -> None:
        coordinator = self._world.coordinator
        if coordinator.alive and not coordinator.frozen:
            self._world.engine.note(f"ASKED {message}")
            self._faults.done.append(f"{self._world.engine.now_s:.4f} asked {message}")
            coordinator.hear(message)

    def _take(self, node: str) -> None:
        agent = self._world.agents[node]
        if agent.alive and not agent.over:
            self._faults.done.append(f"{self._world.engine.now_s:.4f} take {node}")
            self._world.laws.excused_nodes.add(node)
            agent.kill()
