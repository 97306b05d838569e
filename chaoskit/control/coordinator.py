"""The coordinator: a thin shell around the membership machine, the hang detector and the leases.

It accepts agents, workers (for rendezvous only) and observers on one authenticated port, feeds what they say into the
state machines and carries out what those decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from chaoskit import messages
from chaoskit.config import RunConfig
from chaoskit.control import membership
from chaoskit.control.deferral import Deferral
from chaoskit.control.hang import HangDetector
from chaoskit.control.lease import Leases
from chaoskit.control.membership import Membership
from chaoskit.control.muster import Muster
from chaoskit.control.rendezvous import RendezvousBoard
from chaoskit.control.repeats import Repeats
from chaoskit.journal import Journal
from chaoskit.messages import (
    Accuse,
    AgentHello,
    Arm,
    Beat,
    EndJob,
    Formed,
    GroupBroken,
    Healed,
    Heartbeat,
    HookReached,
    LeverPulled,
    ObserverHello,
    Ping,
    Plan,
    Pong,
    Release,
    RendezvousHello,
    StartWorker,
    StopWorker,
    Trigger,
    Welcome,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from chaoskit.osprocess import Starvation, die_with_parent, host_id, raise_priority, set_name
from chaoskit.vocabulary import Event, Phase

_TICK_S = 0.02
_FAREWELL_S = 1.0
_STALLS_MAX = 20
_BROKEN_GRACE_S = 0.15  # a lost rank is usually known sooner than the broken collectives it leaves behind


class CoordinatorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a substrate tells a new coordinator."""

    config: RunConfig
    triggers: tuple[Trigger, ...]
    token: str
    run_directory: str


class Coordinator:
    """Serves one run."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec, self._config = spec, spec.config
        self._journal = Journal(Path(spec.run_directory) / "journal", "coordinator")
        self._membership = Membership(spec.config)
        self._hangs = HangDetector(spec.config)
        self._muster = Muster()
        self._deferral: Deferral[str] = Deferral()
        self._repeats = Repeats(limit=spec.config.nodes)
        self._stalls = Repeats(limit=_STALLS_MAX)
        self._leases = Leases(spec.config.heartbeat_ms / 1000, spec.config.lease_beats)
        self._board = RendezvousBoard()
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._starved: dict[str, tuple[Starvation, int]] = {}  # agents on this host, with the last reading in ns
        self._hosts: dict[str, str] = {}  # worker -> node
        self._observers: set[asyncio.StreamWriter] = set()
        self._beats: dict[str, Beat] = {}
        self._formed: set[str] = set()
        self._settled = 0
        self._ended = asyncio.Event()
        self._started_s = time.monotonic()
        self._waiting_nodes: list[str] | None = []

    async def serve(self, listener: socket.socket) -> None:
        """Until the job ends."""
        server = await asyncio.start_server(self._greet, sock=listener)
        ticker = asyncio.ensure_future(self._tick())
        try:
            await self._ended.wait()
            await self._drain()
        finally:
            ticker.cancel()
            server.close()

    async def _drain(self) -> None:
        for writer in (*self._agents.values(), *self._observers):
            with contextlib.suppress(TimeoutError, OSError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _FAREWELL_S)

    # -- connections ----------------------------------------------------------------------------------------------

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await messages.accept_async(reader, writer, self._spec.token)
            hello = await messages.read_message(reader)
            if isinstance(hello, AgentHello):
                await self._serve_agent(hello, reader, writer)
            elif isinstance(hello, ObserverHello):
                await self._serve_observer(reader, writer)
            elif isinstance(hello, RendezvousHello):
                await self._board.serve(reader, writer)
        except (ConnectionError, messages.Refused) as error:
            if isinstance(error, messages.Refused):
                sys.stderr.write(f"refused a connection: {error}\n")
        except Exception:  # noqa: BLE001 - a bug of ours must end the run, not one connection
            traceback.print_exc()
            self._end(False, "the coordinator failed; see its log")
        finally:
            writer.close()

    async def _serve_agent(self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = hello.node
        if node in self._agents:
            raise messages.Refused(f"a node named {node} is connected already")
        self._agents[node] = writer
        if hello.host_id == host_id():
            self._starved[node] = (Starvation(hello.pid, hello.pid), 0)
        writer.write(messages.encode(Welcome(self._config, self._spec.triggers)))
        self._join(node)
        try:
            while True:
                self._hear(await messages.read_message(reader))
        except ConnectionError:
            self._lose_node(node, "the agent's connection ended")

    async def _serve_observer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._observers.add(writer)
        writer.write(messages.encode(Welcome(self._config, self._spec.triggers)))
        try:
            while True:
                self._hear(await messages.read_message(reader))
        finally:
            self._observers.discard(writer)

    def _show(self, message: messages.Message) -> None:
        data = messages.encode(message)
        for writer in self._observers:
            writer.write(data)

    def _order(self, node: str, message: messages.Message) -> None:
        writer = self._agents.get(node)
        if writer is not None:
            writer.write(messages.encode(message))

    # -- what agents, workers and observers say -------------------------------------------------------------------

    def _hear(self, message: Any) -> None:
        match message:
            case Heartbeat(node, beats):
                self._leases.beat(node, time.monotonic())
                self._beats.update((beat.worker, beat) for beat in beats)
                self._show(message)
                self._start(self._deferral.observe(beats, time.monotonic()))
                self._look_for_hangs()
                return
            case WorkerReady(worker, node, endpoint):
                self._show(message)  # before the plan that it makes possible
                self._advance(membership.WorkerReady(worker, node, endpoint))
                if worker in self._membership.spares:
                    self._journal.write(Event.SPARE_READY, worker=worker)
                return
            case WorkerLost(worker, _, cause, detail, detected_ns):
                self._show(message)  # before the plan that answers it
                self._lose_worker(worker, cause, detail, detected_ns)
                return
            case WorkerFailed(worker, error, fatal):
                fatal = fatal or self._repeats.note(error, self._committed())
                if not fatal or self._membership.outlives(worker):
                    return  # the agent reports the loss
                self._show(message)
                self._advance(membership.JobFailed(error))
                return
            case WorkerDone(worker, step):
                self._advance(membership.WorkerDone(worker, step))
            case Formed(worker, generation):
                self._note_formed(worker, generation)
            case Healed(worker):
                self._advance(membership.Healed(worker))
            case GroupBroken(_, generation, detail):
                asyncio.get_running_loop().call_later(_BROKEN_GRACE_S, self._stall, generation, detail)
            case Accuse(_, accused, _, _, cause, detail):
                for name in accused:  # a worker that was found guilty is so in every later generation
                    if name in self._membership.members:
                        self._stop_and_lose(name, cause, detail)
            case Release(worker=worker) | Ping(worker=worker):
                self._order(self._hosts.get(worker, ""), message)
                return
            case Arm(node):
                self._order(node, message)
                return
            case EndJob(ok, reason):
                self._end(ok, reason)
                return
            case HookReached() | LeverPulled() | Pong():
                pass
            case _:
                raise messages.Refused(f"unexpected {type(message).__name__}")
        self._show(message)

    def _note_formed(self, worker: str, generation: int) -> None:
        if generation != self._membership.generation:
            return
        self._formed.add(worker)
        if self._formed.issuperset(self._membership.members) and self._settled != generation:
            self._settled = generation
            self._journal.write(Event.SETTLED, generation=generation)
            self._advance(membership.Settled(generation))

    def _stall(self, generation: int, detail: str) -> None:
        """Plan the same members again, unless that did not help often enough."""
        if generation != self._membership.generation:
            return
        if self._stalls.note("stalled", self._committed()):
            self._advance(membership.JobFailed(f"no step is committed after {_STALLS_MAX} new starts: {detail}"))
        else:
            self._advance(membership.Stalled(generation))

    def _committed(self) -> int:
        """Steps that some rank has committed."""
        return max((beat.step for beat in self._beats.values()), default=0)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _rank_of(self, worker: str) -> int | None:
        plan = self._membership.plan
        member = plan.member(worker) if plan is not None else None
        return member.rank if member is not None else None

    def _lose_worker(self, worker: str, cause: str, detail: str, detected_ns: int) -> None:
        self._beats.pop(worker, None)
        self._journal.write(
            Event.DETECTED, t_ns=detected_ns, worker=worker, rank=self._rank_of(worker), cause=cause, detail=detail
        )
        self._advance(membership.WorkerLost(worker))

    def _stop_and_lose(self, worker: str, cause: str, detail: str) -> None:
        node = self._hosts.get(worker, "")
        lost = WorkerLost(worker, node, cause, detail, time.monotonic_ns())
        self._order(node, StopWorker(worker, cause))
        self._show(lost)
        self._lose_worker(worker, cause, detail, lost.detected_ns)

    def _lose_node(self, node: str, detail: str) -> None:
        writer = self._agents.pop(node, None)
        if writer is None or self._ended.is_set():
            return
        writer.close()  # whoever speaks for this node from now on is not heard
        self._leases.drop(node)
        if node in self._starved:
            self._starved.pop(node)[0].close()
        now_ns = time.monotonic_ns()
        for worker in [worker for worker, host in self._hosts.items() if host == node]:
            self._beats.pop(worker, None)
            rank = self._rank_of(worker)
            if rank is not None and worker in self._membership.members:
                self._journal.write(
                    Event.DETECTED, t_ns=now_ns, worker=worker, rank=rank, cause="node lost", detail=detail
                )
                self._show(WorkerLost(worker, node, "node lost", detail, now_ns))
        self._advance(membership.NodeLost(node))

    def _look_for_hangs(self) -> None:
        plan, now_s = self._membership.plan, time.monotonic()
        if plan is None:
            return
        members = self._membership.members
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        ranks = self._board.arrived(messages.STANDING)
        arrived = {member.worker for member in plan.members if member.rank in ranks}
        hangs = {hang.worker: hang for hang in self._muster.observe(plan, beats, arrived, now_s)}
        hangs |= {hang.worker: hang for hang in self._hangs.observe(beats, now_s)}
        for hang in hangs.values():
            detail = (
                f"{Phase(hang.phase).label} for {hang.age_s * 1000:.0f} ms, limit {hang.limit_s * 1000:.0f} ms, "
                "while others wait"
            )
            self._stop_and_lose(hang.worker, "hung", detail)
        together = not plan.abort or all(beat.generation == plan.generation for beat in beats)
        if not hangs and together and len(beats) == len(members) and self._hangs.stalled(now_s):
            self._stall(plan.generation, "every rank waits for the others")

    # -- time -----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._forgive_starvation()
            for node in self._leases.expired(now_s):
                self._lose_node(node, f"silent for {self._config.lease_beats} beats")
            if self._waiting_nodes and now_s - self._started_s > self._config.startup_s:
                self._admit_waiting()
            self._advance(membership.Tick())

    def _forgive_starvation(self) -> None:
        """An agent on this host that waited for a CPU was not silent: extend its lease by that time."""
        for node, (starvation, before_ns) in self._starved.items():
            after_ns = starvation.read_ns()
            self._leases.extend(node, max(0, after_ns - before_ns) / 1e9)
            self._starved[node] = (starvation, after_ns)

    def _join(self, node: str) -> None:
        """Ranks follow the names of the nodes, not the accident of who connected first."""
        if self._waiting_nodes is None:
            self._admit(node)
            return
        self._waiting_nodes.append(node)
        if len(self._waiting_nodes) >= self._config.nodes:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        waiting, self._waiting_nodes = sorted(self._waiting_nodes or []), None
        for node in waiting:
            self._admit(node)

    def _admit(self, node: str) -> None:
        self._leases.beat(node, time.monotonic())
        self._advance(membership.NodeJoined(node))

    # -- decisions ------------------------------------------------------------------------------------------------

    def _advance(self, event: membership.Event) -> None:
        for action in self._membership.handle(event, time.monotonic()):
            match action:
                case membership.Publish(plan):
                    self._publish(plan)
                case membership.StartWorker(node, worker):
                    self._hosts[worker] = node
                    self._start(self._deferral.submit(worker))
                case membership.StopWorker(worker, cause):
                    self._order(self._hosts.get(worker, ""), StopWorker(worker, cause))
                case membership.Finish(ok, reason):
                    self._end(ok, reason)

    def _start(self, workers: list[str]) -> None:
        for worker in workers:
            self._order(self._hosts[worker], StartWorker(worker))

    def _publish(self, plan: Plan) -> None:
        if plan.abort:
            self._deferral.recover(plan.generation, len(plan.members), time.monotonic())
        self._formed.clear()
        self._board.begin(plan.generation, len(plan.members))
        for node in dict.fromkeys(member.node for member in plan.members):
            self._order(node, plan)
        self._show(plan)
        self._journal.write(
            Event.PLAN,
            generation=plan.generation,
            abort=plan.abort,
            members=[{"rank": m.rank, "worker": m.worker, "node": m.node, "shards": m.shards} for m in plan.members],
        )

    def _end(self, ok: bool, reason: str) -> None:
        if self._ended.is_set():
            return
        self._journal.write(Event.JOB_ENDED, ok=ok, reason=reason)
        self._show(EndJob(ok, reason))
        for node in self._agents:
            self._order(node, EndJob(ok, reason))
        self._ended.set()


def run_coordinator(spec: CoordinatorSpec, listener: socket.socket, parent_pid: int) -> None:
    """The life of a coordinator process. Does not return."""
    die_with_parent(parent_pid)
    set_name("ck-coordinator")
    raise_priority()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        await Coordinator(spec).serve(listener)
        os._exit(0)  # asyncio would cancel the open connections one by one, and complain

    code = 1
    try:
        asyncio.run(main())
    except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
        traceback.print_exc()
    finally:
        os._exit(code)
