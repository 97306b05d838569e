"""The shell around the real control plane, as a process that may end between any two of its acts.

It stands for ``coordinator/server.py`` and ``coordinator/log.py``, line by line where it matters:
events are written to the log first, then the outputs are carried out in their order.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.regroup import may_rebalance
from chaoskit.coordinator.outputs import Disconnect, End, LogEntry, Output, Send, WriteRecord
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.coordinator.rendezvous import RendezvousReply
from chaoskit.errors import Refused
from chaoskit.wire import messages
from chaoskit.wire.messages import AgentHello, Probe
from simulation.engine import Process
from simulation.network import SERVER, Line

if TYPE_CHECKING:
    from simulation.world import World

TICK_S = 0.05


class Fenced(Exception):
    """The coordinator does not hold the log any more."""


class Log:
    """The model of ``coordinator/log.py``: it belongs to the coordinator that took it over last.

    Attributes:
        holder: stands for the inode; 0 while there is no log.
    """

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.term = 0
        self.holder = 0
        self.losses = 0
        self._holders = count(1)

    def take_over(self) -> tuple[int, int]:
        """Begin the next term. Return its number and its holder."""
        self.term += 1
        self.holder = next(self._holders)
        return self.term, self.holder

    def outbid(self, term: int) -> int:
        """Return a new term that is higher than ``term``, which a node knows."""
        self.term = term + 1
        return self.term

    def lose(self) -> None:
        """Delete the log. Its coordinator notices that at its next check."""
        self.entries, self.term, self.holder = [], 0, 0
        self.losses += 1

    def append(self, holder: int, entries: list[LogEntry]) -> None:
        """Append entries. Raise Fenced if ``holder`` does not hold the log."""
        if holder != self.holder:
            raise Fenced
        self.entries += entries


class Coordinator(Process):
    """The model of ``Coordinator``, for one term."""

    def __init__(self, world: World) -> None:
        self.world, self.log = world, world.log
        self.term, self._holder = self.log.take_over()
        super().__init__(world.engine, f"coordinator {self.term}")
        self.began_s = self.awake_since_s = self.engine.now_s
        self._seams = seams = world.seams
        self.plane = ControlPlane(
            seams.coordinator(world.config),
            tuple(self.log.entries),
            self.engine.now_s,
            policies=seams.policies,
            limits=seams.limits,
        )
        #: The last generation of the coordinators before this one.
        self.inherited = self.plane.membership.generation
        self.over = False
        #: Number of acts that it still carries out before it ends; None if no end is due.
        self.acts_left: int | None = None
        self._agents: dict[str, Line] = {}
        self.after(TICK_S, self._tick)
        self._do("retell", self.plane.retell())

    def thaw(self) -> None:
        self.awake_since_s = self.engine.now_s
        super().thaw()

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are attached."""
        return frozenset(self._agents)

    # -- connections -------------------------------------------------------------------------------

    def serve(self, line: Line) -> None:
        """Serve a connection, like ``_greet``: its first message shows what the client is."""
        line.bind(SERVER, lambda message: self._hear_first(line, message), lambda: None)

    def _hear_first(self, line: Line, message: Any) -> None:
        if isinstance(message, AgentHello):
            self._serve_agent(line, message)
        else:  # the rendezvous of a worker
            line.bind(
                SERVER, lambda request: self._ask(line, request), lambda: self.plane.hang_up(line)
            )
            self._ask(line, message)

    def _serve_agent(self, line: Line, hello: AgentHello) -> None:
        if not self._holds():
            return
        term = self.term
        if hello.term > term:
            self.term = self.log.outbid(hello.term)
        try:
            (received,) = self._seams.hears(self.plane, hello)
            outputs = self.plane.attach(received, self.engine.now_s, term=term)
        except Refused:
            line.close(SERVER)
            return
        node = hello.node
        former = self._agents.get(node)
        self._agents[node] = line
        if former is not None:
            former.close(SERVER)
        self.engine.note(
            f"{self.name} <- {node} attaches with {hello.workers}, ended {hello.ended}"
        )
        line.send(SERVER, self.term)  # stands for Welcome
        line.bind(
            SERVER, lambda message: self._hear(node, line, message), lambda: self._lose(node, line)
        )
        self._do("attach", outputs)

    def _hear(self, node: str, line: Line, message: Any) -> None:
        if self._agents.get(node) is line:
            self.hear(message)

    def _lose(self, node: str, line: Line) -> None:
        if self._agents.get(node) is line:
            dead = not line.client_alive()
            self._do(
                "detach",
                self.plane.detach(
                    node, "the agent's connection ended", self.engine.now_s, dead=dead
                ),
            )

    def _ask(self, line: Line, request: Any) -> None:
        self._do("ask", self.plane.ask(line, request))

    def stop_run(self, reason: str) -> None:
        """End the job, as an observer would."""
        self.hear(messages.EndJob(False, reason))

    def hear(self, message: messages.Message) -> None:
        """Pass the message of a node or an observer to the plane."""
        if self._holds():
            for received in self._seams.hears(self.plane, message):
                self._do("hear", self.plane.hear(received, self.engine.now_s))

    def rebalance(self, fast: int) -> None:
        """Give the rank that ``fast`` picks most of the shards, as the workload detector would."""
        membership = self.plane.membership
        if not self._holds() or not may_rebalance(membership) or membership.plan is None:
            return
        members = [member.worker for member in membership.plan.members]
        shares = dict.fromkeys(members, 1)
        shares[members[fast % len(members)]] += self.world.config.shards_of(-1, len(members)) - len(
            members
        )
        self.carry_out(self.plane.commit(events.Rebalanced(shares), self.engine.now_s))

    # -- decisions ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._holds():
            return
        acknowledged = [node for node, line in self._agents.items() if line.take_acknowledged()]
        self._do("tick", self.plane.tick(self.engine.now_s, {}, acknowledged))
        self.after(TICK_S, self._tick)

    def _holds(self) -> bool:
        """Return whether this coordinator holds the log, like ``RunLog.check``; else end."""
        if self._holder != self.log.holder:
            self.engine.note(f"{self.name} is fenced")
            self.kill()
        return self.alive

    def _dies_here(self) -> bool:
        if self.acts_left is not None:
            self.acts_left -= 1
            if self.acts_left < 0:
                self.kill()
        return not self.alive

    def _do(self, what: str, outputs: list[Output]) -> None:
        self.carry_out(self._seams.does(what, outputs))

    def carry_out(self, outputs: list[Any]) -> None:
        """Carry out outputs, like ``_carry_out``: the log first, then the others in their order."""
        if not outputs or not self.alive:
            return
        entries = [output for output in outputs if isinstance(output, LogEntry)]
        if entries and not self._append(entries):
            return
        laws = self.world.laws
        for output in outputs:
            kind = type(output)
            if kind is Send:
                if not isinstance(output.message, Probe) and self._dies_here():
                    return
                laws.sent(self, output.node, output.message)
                line = self._agents.get(output.node)
                if line is not None and isinstance(output.message, Probe):
                    line.probe()
                elif line is not None:
                    line.send(SERVER, output.message)
            elif kind is RendezvousReply:
                if self._dies_here():
                    return
                output.client.send(SERVER, output.message)
            elif kind is WriteRecord:
                if self._dies_here():
                    return
                laws.noted(self, output.event, output.fields)
            elif kind is Disconnect:
                line = self._agents.pop(output.node, None)
                if line is not None:
                    line.close(SERVER)
            elif kind is End:
                self.over = True
                self.kill()
                return

    def _append(self, entries: list[LogEntry]) -> bool:
        """Append entries to the log. Return False if the coordinator ends meanwhile.

        In this case, any number of the entries may be in the log.
        """
        whole = len(entries)
        if self.acts_left is not None and self.acts_left < len(entries):
            whole = self.acts_left
        try:
            self.log.append(self._holder, entries[:whole])
        except Fenced:
            self.engine.note(f"{self.name} is fenced")
            self.kill()
            return False
        for entry in entries[:whole]:
            self.engine.note(f"{self.name} logs {entry.event}")
        self.world.laws.logged(self, entries[:whole])
        if whole < len(entries):
            self.kill()
            return False
        if self.acts_left is not None:
            self.acts_left -= whole
        return True
