"""How long the control plane waits for others, where no setting of a run says so."""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Each in seconds, with its reason.

    Attributes:
        forming_s: the members of a generation that a coordinator left unsettled have this long to say that it is
            formed. A rendezvous that ended with the coordinator is told by the workers that were in it: this is for
            what is never told, and a busy machine needs time.
        recall_s: the nodes have this long to say what they can offer; sealing takes the time to read the state once.
        fresh_s: training may go on while the nodes answer. An answer that is older than this is not acted upon: they
            are asked again.
        apart_s: answers further apart than this may be of different steps, where the later one shows that ranks have
            trained on.
        gather_s: a world that begins with copies waits this long for the next worker to become ready.
        retry_s: a copy that cannot be read and is still offered was out of reach: it is tried again after this long,
            and twice as long after each further attempt.
        retry_max_s: but never after longer than this, or a network that heals would be noticed too late.
        reach_s: attempts that fail for longer than this make older copies better.
        healing_s: once no worker is left that holds the state, a member that is taking it over has this long to say
            that it does.
        slow_agent_s: an agent may say nothing for this long while the kernel of its node acknowledges what it is sent:
            the ranks there train on without it, and a disk, a debugger or a burst of page faults holds a process up
            for some tenths of a second. Meanwhile no rank there can be ended or told of a new plan, so it is not more;
            a longer lease is the limit instead.
        farewell_s: a rank that goes and is well has this long for what its script wants to do before, where no elastic
            policy says how long.
    """

    forming_s: float = 1.0
    recall_s: float = 2.0
    fresh_s: float = 0.1
    apart_s: float = 0.1
    gather_s: float = 0.25
    retry_s: float = 0.5
    retry_max_s: float = 15.0
    reach_s: float = 5.0
    healing_s: float = 2.0
    slow_agent_s: float = 1.0
    farewell_s: float = 30.0

    def farewell_of(self, config: RunConfig) -> float:
        """Seconds that a rank that goes and is well may take."""
        return (
            self.farewell_s
            if config.elastic is None
            else config.elastic.graceful_shutdown_timeout_s
        )


#: The limits of every real run.
LIMITS = Limits()
