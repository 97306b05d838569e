"""The agent of a node: the real :class:`Facts`, in a model of ``agent/agent.py`` and ``agent/coordinator_link.py``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from chaoskit.wire import messages
from chaoskit.wire.lease import REPORT_SHARE, Leases
from chaoskit.wire.messages import (
    AgentHello,
    Beat,
    EndJob,
    Heard,
    Heartbeat,
    LinksTested,
    Plan,
    Recall,
    StartWorker,
    StopWorker,
    TestLinks,
    WorkerFailed,
    WorkerLost,
)
from simulation.engine import Process
from simulation.network import CLIENT, Line

if TYPE_CHECKING:
    from simulation.processes.worker import Worker
    from simulation.world import World

RETRY_S = 0.02
ANSWER_S = 2.0
#: ``uplink._RETURN_S``
RETURN_S = 2.0
#: ``uplink._PATIENCE``
PATIENCE = 2
#: Latency between an agent and its workers; it is constant, so that messages keep their order.
LOCAL_S = 0.0003


class Charge:
    """The model of ``WorkerHandle``: the agent's handle of a worker."""

    __slots__ = ("latched", "lost", "process")

    def __init__(self, process: Worker) -> None:
        self.process, self.lost, self.latched = process, False, False

    @property
    def lingers(self) -> bool:
        """True if some of its code may still run, although it counts as lost."""
        return self.lost and not self.latched


class Agent(Process):
    """The model of ``Agent`` with its ``Uplink``."""

    def __init__(self, world: World, node: str, incarnation: int) -> None:
        super().__init__(world.engine, f"agent {node}#{incarnation}")
        self.world, self.node, self.pid = world, node, 1000 * (incarnation + 1)
        self.facts = world.seams.facts()
        self.charges: dict[str, Charge] = {}
        self.kept: Any = world.new_keeper(
            self
        )  # in a job of kind "replicated" nothing outlives its worker
        self.generation = 0
        self.term = 0
        self.over = False  # the job has ended here
        self.quiet_since_s = 0.0  # in contact with its coordinator since then, without a break
        self._line: Line | None = None
        self._attempt = 0
        self._config = config = world.seams.node(world.config)
        self._leases = Leases(config.heartbeat_ms / 1000, PATIENCE * config.lease_beats)
        self._seeks = True  # it looks for a coordinator
        self._acknowledged_s = world.engine.now_s
        self._give_up_s = world.engine.now_s + config.coordinator_outage_s
        self.lease_until_s = math.inf  # as the boards of its workers show it
        self.ends.append(self._take_along)
        self.after(world.engine.uniform(0.0, 0.2), self._attach)
        self.after(0.0, self._beat)

    def _take_along(self) -> None:
        """End all workers, as by PR_SET_PDEATHSIG: no worker outlives its agent."""
        for charge in self.charges.values():
            charge.process.kill()

    # -- uplink ------------------------------------------------------------------------------------

    def thaw(self) -> None:
        self.quiet_since_s = self.engine.now_s
        super().thaw()

    def tell(self, message: messages.Message) -> None:
        """Send a message to the coordinator, like ``Uplink.tell``."""
        self.facts.note(message)
        if self._line is not None:
            self._line.send(CLIENT, message)

    def _attach(self) -> None:
        if self.over:
            return
        if self.engine.now_s > self._give_up_s:
            self.engine.note(f"{self.name} gives up: no coordinator")
            self.world.laws.gave_up(self.node)
            self.kill()
            return
        line = self.world.connect(self)
        if line is None:
            self.after(RETRY_S, self._attach)
            return
        self._attempt += 1
        attempt = self._attempt
        sent_s = self.engine.now_s
        line.bind(
            CLIENT,
            lambda term: self._welcomed(line, attempt, term, sent_s),
            lambda: self._try_again(attempt),
        )
        line.send(CLIENT, self._hello())
        self.after(ANSWER_S, self._give_up, line, attempt)

    def _hello(self) -> AgentHello:
        living = tuple(name for name, charge in self.charges.items() if not charge.lost)
        ended, started = self.facts.ended, self.world.names.get(self.node, 0)
        return AgentHello(
            self.node, "host", self.pid, self.generation, living, ended, self.term, started
        )

    def _give_up(self, line: Line, attempt: int) -> None:
        if attempt == self._attempt and self._seeks:
            line.close(CLIENT)
            self._try_again(attempt)

    def _try_again(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._attempt += 1
            self.after(RETRY_S, self._attach)

    def _welcomed(self, line: Line, attempt: int, term: int, sent_s: float) -> None:
        if attempt != self._attempt:
            line.close(CLIENT)
            return
        if term < self.term:
            line.close(CLIENT)
            self._try_again(attempt)
            return
        former, self._seeks = self._line, False
        self.term, self._line = term, line
        if former is not None:
            former.close(CLIENT)
        self._acknowledge(sent_s)
        self._attempt += 1  # cancels the timeout of this attempt
        self.quiet_since_s = self.engine.now_s
        line.bind(CLIENT, self._obey, lambda: self._bereft(line))
        for message in self.facts.tell():
            line.send(CLIENT, message)

    def _bereft(self, line: Line) -> None:
        """Look for a coordinator when this connection has ended, like ``Uplink.follow``."""
        if self._line is line:
            self._line = None
            self._seek()

    def _seek(self) -> None:
        if not self._seeks:
            self._seeks = True
            outage_s = self._config.coordinator_outage_s
            self._give_up_s = max(self._acknowledged_s + outage_s, self.engine.now_s + RETURN_S)
            if self._line is not None:  # the coordinator is silent: its late messages are not read
                self._line.bind(CLIENT, lambda message: None, lambda: None)
            self._attach()

    def _acknowledge(self, sent_s: float) -> None:
        """Renew the lease: a coordinator has answered a message that was sent at ``sent_s``."""
        self._acknowledged_s = max(self._acknowledged_s, sent_s)
        self._leases.beat("coordinator", self.engine.now_s)

    @property
    def line(self) -> Line | None:
        """The connection to the current coordinator, if there is one."""
        return self._line

    # -- orders ------------------------------------------------------------------------------------

    def _obey(self, message: Any) -> None:
        self.facts.note(message)
        match message:
            case Heard(sent_ns):
                if sent_ns / 1e9 > self._acknowledged_s:
                    self._acknowledge(sent_ns / 1e9)
            case Plan(generation):
                self.generation = max(self.generation, generation)
                for worker in (*(member.worker for member in message.members), *message.leavers):
                    self._pass_on(worker, message)
                if self.world.kind != "replicated":
                    self.kept.follow(message)
            case TestLinks(number, targets):
                took_s = self.engine.uniform(0.001, 0.5) if targets else LOCAL_S
                self.after(took_s, self._test_links, number, [node for node, _, _ in targets])
            case StartWorker(worker):
                if worker not in self.charges:
                    names = self.world.names  # stand for the logs that workers leave on their node
                    names[self.node] = max(
                        names.get(self.node, 0), int(worker.rpartition(".")[2]) + 1
                    )
                    self.charges[worker] = Charge(self.world.new_worker(self, worker))
            case Recall():
                self.kept.recall(message)
            case StopWorker(worker):
                if worker in self.charges:
                    self._kill(self.charges[worker])
            case EndJob():
                self.engine.note(f"{self.name} hears {message}")
                self.over = True
                self._take_along()

    def _test_links(self, number: int, nodes: list[str]) -> None:
        """Test the links to these nodes, like ``can_connect``."""
        away = [
            node
            for node in nodes
            if self.world.apart(self.node, node) or not self.world.agents[node].alive
        ]
        self.tell(LinksTested(self.node, number, tuple(away)))

    def _pass_on(self, worker: str, message: messages.Message) -> None:
        charge = self.charges.get(worker)
        if charge is not None and not charge.lost:
            charge.process.after(LOCAL_S, charge.process.hear, message)

    def _kill(self, charge: Charge) -> None:
        charge.lost = True
        charge.process.kill()

    # -- messages and boards of workers
    # ---------------------------------------------------------------------------

    def hear(self, worker: Worker, message: messages.Message) -> None:
        """Pass a message of a worker on, like ``_listen``."""
        self.engine.note(f"{worker.name}: {message}")
        self.tell(message)
        if isinstance(message, WorkerFailed) and worker.name in self.charges:
            charge = self.charges[worker.name]
            self._lose(charge, "raised", message.error)
            self._kill(charge)

    def notice_end(self, worker: Worker) -> None:
        """Notice the end of a worker.

        The latch, the pidfd or the zygote reports it first; the last frees it.
        """
        self.after(self.engine.uniform(0.0001, 0.002), self._ended, worker)

    def _ended(self, worker: Worker) -> None:
        charge = self.charges.get(worker.name)
        if charge is not None and charge.process is worker:
            self._lose(charge, "exited", "the kernel reports its end")
            charge.latched = True
            self.kept.ended(worker.name)
            self.after(self.engine.uniform(0.0, 0.02), self._release, worker)

    def _release(self, worker: Worker) -> None:
        self.charges.pop(worker.name, None)
        self.after(2 * LOCAL_S, self.facts.close, worker.name)  # all its messages are here by then

    def notice_stop(self, worker: Worker) -> None:
        """End a stopped worker, as the zygote reports SIGSTOP at once."""
        charge = self.charges.get(worker.name)
        if charge is not None and not self.over:
            self._lose(charge, "stopped", "stopped by SIGSTOP")
            self._kill(charge)

    def _lose(self, charge: Charge, cause: str, detail: str) -> None:
        if not charge.lost:
            charge.lost = True
            process, detected_ns = charge.process, int(self.engine.now_s * 1e9)
            self.tell(
                WorkerLost(
                    process.name, self.node, cause, detail, detected_ns, process.board.trained_in
                )
            )

    def _beat(self) -> None:
        if self.over:
            return
        if self._line is not None:
            beats = [
                self._read_board(charge.process)
                for charge in self.charges.values()
                if not charge.lost
            ]
            self.tell(Heartbeat(self.node, tuple(beats), int(self.engine.now_s * 1e9)))
            self.kept.went_on(max((beat.step for beat in beats), default=0))
        if self._leases.expired(self.engine.now_s):
            self._seek()
        self.lease_until_s = self._acknowledged_s + self._config.coordinator_outage_s
        self.after(self._config.heartbeat_ms / 1000 * REPORT_SHARE, self._beat)

    def _read_board(self, worker: Worker) -> Beat:
        board = worker.board
        age_ms = (self.engine.now_s - board.since_s) * 1000
        return Beat(
            worker=worker.name,
            generation=board.generation,
            rank=board.rank,
            step=board.step,
            phase=board.phase,
            age_ms=age_ms,
            starved_ms=0.0,
            commits=board.commits,
            loss=0.0,
            longest_ms=tuple(longest_s * 1000 for longest_s in board.longest_s.values()),
            trained_in=board.trained_in,
        )
