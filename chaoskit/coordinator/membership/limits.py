"""Time limits of the control plane that no setting of a run states.

-> config.py: the limits that are settings, such as ``startup_s``;
coordinator/detectors/phase_limits.py: the limit after which a rank hangs; wire/lease.py: the lease
of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits in seconds, each with its reason.

    Attributes:
        forming_s: time in which the members of a generation that a coordinator left unsettled must
            report that it is formed. Workers report a rendezvous that ended with the coordinator;
            this limit is for reports that never come.
        recall_s: time in which the nodes must offer their copies. Sealing a copy takes the time to
            read the state once.
        fresh_s: training may continue while the nodes answer. An answer that is older than this is
            not acted upon: the nodes are asked again.
        apart_s: answers further apart than this may be of different steps, if the later one shows
            that ranks have trained on.
        gather_s: a world that begins with copies waits this long for the next worker to become
            ready.
        retry_s: a copy that cannot be read and is still offered was out of reach: it is tried again
            after this long, and twice as long after each further attempt.
        retry_max_s: longest time before such a retry. Otherwise a network that heals would be
            noticed too late.
        reach_s: attempts that fail for longer than this make older copies better.
        healing_s: once no worker is left that holds the state, a member that is taking it over has
            this long to report that it has it.
        slow_agent_s: an agent may send nothing for this long while the kernel of its node
            acknowledges messages. The ranks there train on, and a disk, a debugger or page faults
            can delay a process for some tenths of a second. It is not longer, because no rank there
            can be ended or get a new plan meanwhile; a longer lease is the limit instead.
        farewell_s: time that a healthy rank has before it ends, in a run without elastic policy.
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
        """Return the seconds that a healthy rank has before it ends, by the settings of the run."""
        return (
            self.farewell_s
            if config.elastic is None
            else config.elastic.graceful_shutdown_timeout_s
        )


#: The limits of every real run.
LIMITS = Limits()
