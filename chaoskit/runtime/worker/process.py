"""A training process: its main thread runs the job, its control thread obeys the agent.

Started by a zygote: forked from it, or as a fresh interpreter where forking is not possible.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from chaoskit.config import RunConfig, disk_directory
from chaoskit.errors import BadInput, JobFailed, JournalFull, NonFiniteBatch, Refused
from chaoskit.job import JobSpec, import_job
from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import host_id, keep_freed_memory, set_name, step_back
from chaoskit.runtime.group.process_group import Group, disown
from chaoskit.runtime.group.regroup import Dismissed, Regrouper
from chaoskit.runtime.group.rendezvous import Rendezvous, RendezvousStore
from chaoskit.runtime.state.peer import StateServer
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.step.base_trainer import this_device
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.runtime.step.collectives import explain_missing_group
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.halting import HaltOrder, TrainingHalted
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.runtime.step.sharded_trainer import ShardedTrainer
from chaoskit.runtime.step.trainer import ReplicatedTrainer, TrainingOver
from chaoskit.runtime.worker.entries import Entries
from chaoskit.runtime.worker.failure import failure_of, format_failure
from chaoskit.runtime.worker.fingerprint import fingerprint
from chaoskit.runtime.worker.sources import imported_sources, source_digest
from chaoskit.runtime.worker.worker_log import redirect_output
from chaoskit.vocabulary import LOAD, Event, Phase
from chaoskit.wire import frames, messages
from chaoskit.wire.coordinator_files import CoordinatorAddress
from chaoskit.wire.injection_line import InjectionDoor, dial
from chaoskit.wire.messages import (
    EndJob,
    Endpoint,
    Formed,
    GroupBroken,
    Halt,
    Member,
    Plan,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerReady,
)

_LAST_WORD_S = 5.0
_NICENESS = (
    5  # below agents and coordinator, whose few microseconds decide how soon a fault is noticed
)


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent tells a new worker. Passed as JSON, by fork or on the command line."""

    worker: str
    node: str
    host: str  # address under which peers reach this node
    coordinator: CoordinatorAddress  # when the agent was started
    token: str
    config: RunConfig
    run_directory: str
    journal: str  # file name of this worker's journal, without suffix
    injection: InjectionDoor | None = None  # of a run with faults


class Control:
    """The control thread, and everything that the main thread sends through it."""

    def __init__(self, spec: WorkerSpec, connection: socket.socket, board: Board) -> None:
        self.spec = spec
        self.journal = Journal(
            Path(spec.run_directory) / "journal", spec.journal, role="worker", node=spec.node
        )
        line = dial(spec.injection, spec.node, spec.worker)
        if line is not None:
            disown(line.fileno())
        self.hooks = Hooks(spec.worker, line, board, self.journal)
        self.callbacks = Callbacks(self.journal, board)
        self.halt = HaltOrder()
        self.regrouper = Regrouper(
            spec.worker,
            self.journal,
            self._open_rendezvous,
            self._build_group,
            self._formed,
            self._failed,
            self._met,
        )
        self._connection = connection
        self._send_lock = threading.Lock()
        self.ended = threading.Event()
        disown(connection.fileno())
        threading.Thread(target=self._obey, name="control", daemon=True).start()

    def send(self, message: messages.Message) -> None:
        with self._send_lock:
            frames.send(self._connection, message)

    def _obey(self) -> None:
        set_name("ck-control")
        try:
            while True:
                self._handle(frames.receive(self._connection))
        except (OSError, Refused):
            pass  # the agent is gone
        except BaseException:  # noqa: BLE001 - such as no room for another thread
            traceback.print_exc()
        finally:
            os._exit(1)  # nobody may train unwatched

    def _handle(self, message: Any) -> None:
        if isinstance(message, Plan):
            if message.member(self.spec.worker) is None and self.spec.worker not in message.leavers:
                os._exit(1)  # fenced: the others go on without this worker
            self.callbacks.hear(message)
            self.regrouper.offer(message)
        elif isinstance(message, Halt):
            self.halt.give(message.step)
        elif isinstance(message, StopWorker):
            self._go(Dismissed(message.grace_s, message.reason))
        elif isinstance(message, EndJob):
            self.ended.set()
            self.journal.sign_off("the job ended")
            os._exit(0 if message.ok else 1)

    def _go(self, order: Dismissed) -> None:
        """The others go on without this worker. The agent ends it when its time is over."""
        nothing_to_do = not self.callbacks.on_preempt or self.regrouper.done
        if nothing_to_do or not self.regrouper.dismiss(order):
            self.regrouper.note_left(told=True)
            self.journal.sign_off("it left")
            step_back()
            os._exit(0)

    def _open_rendezvous(self) -> Rendezvous:
        spec = self.spec
        return Rendezvous(
            spec.coordinator.latest(spec.run_directory).store, spec.token, spec.worker
        )

    def _build_group(self, rendezvous: Rendezvous, plan: Plan, me: Member) -> Group:
        config = self.spec.config
        store = RendezvousStore(
            rendezvous, plan.generation, me.rank if config.device == "cpu" else None
        )
        return Group(
            store,
            me.rank,
            len(plan.members),
            this_device(config.device),
            address=self.spec.host,
            timeout_s=config.collective_timeout_s,
        )

    def _met(self, plan: Plan, me: Member) -> None:
        self.hooks.reach("regroup", self.regrouper.step, plan, me)

    def _formed(self, generation: int) -> None:
        self.send(Formed(self.spec.worker, generation))

    def _failed(self, generation: int, detail: str) -> None:
        if any(words in detail for words in _NO_THREADS):
            sys.stderr.write(f"generation {generation} could not be formed here: {detail}\n")
            # the trouble is this worker's own: all others would wait for it, in one generation after the other
            os._exit(1)
        self.send(GroupBroken(self.spec.worker, generation, detail))

    def share(self, replica: Replica) -> Endpoint:
        """Let peers copy the state of ``replica``."""
        server = StateServer(replica, self.spec.token, self.spec.host)
        arena_fd = replica.arena.fd if replica.arena is not None else -1
        return Endpoint(host_id(), self.spec.host, server.port, os.getpid(), arena_fd)

    def ready(self, endpoint: Endpoint) -> None:
        """Warm, and able to take a rank."""
        config = self.spec.config
        exact = config.reduction == "exact"
        mark = fingerprint(_sources[config.job.path], this_device(config.device), exact=exact)
        self.journal.write(Event.READY, worker=self.spec.worker, pid=os.getpid(), fingerprint=mark)
        self.send(WorkerReady(self.spec.worker, self.spec.node, endpoint, mark))


#: What Python and gloo say where the kernel refuses a thread.
_NO_THREADS = ("can't start new thread", "Resource temporarily unavailable")

#: Digests of job files as they were loaded: a zygote's workers run that, whatever is edited since.
_sources: dict[str, str] = {}

#: Job files that were imported without an exception: one in an import ends the job, as every rank imports the same.
_loaded: set[str] = set()


def load_job(job: JobSpec) -> Callable[..., None]:
    """The job's train function. Imports its file."""
    if job.path not in _sources:
        _sources[job.path] = source_digest(Path(job.path))
    module = import_job(job)
    imported_sources()  # now, as they are
    train: Callable[..., None] = getattr(module, job.function)
    _loaded.add(job.path)
    return train


def run_worker(spec: WorkerSpec, connection_fd: int, board_fd: int, bell_fd: int) -> None:
    """The life of a worker process. Does not return."""
    set_name(f"ck-{spec.worker}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(0.0005)  # the control thread must not wait 5 ms for the main thread
    redirect_output()
    board = Board(board_fd, bell_fd)
    board.sign_on()
    torch.set_num_threads(1)
    keep_freed_memory()
    if spec.config.device == "cuda":
        torch.cuda.set_device(_gpu_of(spec.node))
    control = Control(spec, socket.socket(fileno=connection_fd), board)
    # of this thread only: control, rendezvous and transfers must not wait behind other ranks' computation
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))
    code = 1
    try:
        code = _train(spec, control, board)
        control.journal.sign_off("the job ended")
    except Dismissed:
        control.journal.sign_off("it left")
        step_back()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raised is reported, then the process ends
        _report_failure(spec, control, error)
    finally:
        os._exit(code)


def _gpu_of(node: str) -> int:
    """Nodes of one host share out its GPUs by their numbers."""
    number = "".join(letter for letter in node if letter.isdigit()) or "0"
    return int(number) % torch.cuda.device_count()


def _train(spec: WorkerSpec, control: Control, board: Board) -> int:
    context = WorkerContext(
        name=spec.worker,
        config=spec.config,
        journal=control.journal,
        board=board,
        hooks=control.hooks,
        regrouper=control.regrouper,
        callbacks=control.callbacks,
        send=control.send,
        share=control.share,
        ready=control.ready,
        token=spec.token,
        host=spec.host,
        disk=disk_directory(spec.run_directory, spec.node),
        halt=control.halt,
    )
    control.hooks.reach(LOAD)
    job = spec.config.job
    train = explain_missing_group()(load_job(job))
    if job.sharded:
        return _train_sharded(control, context, lambda trainer: train(trainer, **job.options))
    trainer, cut_short_by = ReplicatedTrainer(context), ""
    try:
        with contextlib.suppress(
            TrainingHalted
        ):  # its state is that of the step, as if the script had returned
            train(trainer, **job.options)
        trainer.finish()
    except TrainingOver as over:
        cut_short_by = over.cut_short_by
    if not trainer.took_part:
        raise BadInput(
            "job",
            spec.config.job.path,
            "enter `with trainer.transaction()` at least once: it never trained",
        )
    board.enter(Phase.DONE)
    replica = trainer.replica
    trainer.tell_state()
    _finish(
        control,
        context,
        trainer.step,
        replica.weights_digest(),
        replica.state_digest(),
        cut_short_by=cut_short_by,
    )
    control.ended.wait()  # peers that are behind may still need this state
    return 0


def _train_sharded(
    control: Control, context: WorkerContext, train: Callable[[ShardedTrainer], None]
) -> int:
    entries = Entries(context, train)
    entries.rehearse(os.getpid())
    while True:
        step, weights_digest, state_digest = entries.run()
        context.board.enter(Phase.DONE)
        _finish(control, context, step, weights_digest, state_digest, generation=entries.generation)
        if entries.is_over(control.ended):
            return 0


def _finish(
    control: Control,
    context: WorkerContext,
    step: int,
    weights_digest: str,
    state_digest: str,
    *,
    generation: int = 0,
    cut_short_by: str = "",
) -> None:
    """This rank has taken the last step."""
    context.journal.write(
        Event.FINISHED,
        step=step,
        weights_digest=weights_digest,
        state_digest=state_digest,
        cut_short_by=cut_short_by,
        halted=context.halt.is_obeyed,
        sources=imported_sources(),
    )
    # said before this rank builds a group with others that are done: then that group is known to be the end's
    control.send(WorkerDone(context.name, step, weights_digest, generation, cut_short_by))
    control.regrouper.finish()


def _report_failure(spec: WorkerSpec, control: Control, error: BaseException) -> None:
    text = format_failure(error)
    sys.stderr.write(text)
    summary, refused = failure_of(error, spec.config.job.path)
    fatal = (
        isinstance(error, (BadInput, NonFiniteBatch, JobFailed))
        or spec.config.job.path not in _loaded
    )
    with contextlib.suppress(JournalFull):
        control.journal.write(Event.FAILED, error=summary, traceback=text)
    control.journal.sign_off(
        "it failed"
    )  # as soon as its agent has read why, this process is ended
    control.send(WorkerFailed(spec.worker, summary, fatal, refused))
    control.ended.wait(_LAST_WORD_S)  # the agent ends this process once it has read why


def main(arguments: list[str]) -> None:
    """Entry point of a fresh interpreter: control socket, board and bell as arguments, the spec on standard input."""
    connection_fd, board_fd, bell_fd = map(int, arguments)
    run_worker(
        msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec),
        connection_fd,
        board_fd,
        bell_fd,
    )
