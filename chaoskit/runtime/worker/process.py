"""The process of a worker: the main thread runs the job, and the control thread obeys the agent.

A zygote starts it: by a fork, or as a fresh interpreter if forking is not possible.

-> worker/zygote.py: the start. agent/worker_handle.py: the agent's side of the connection.
step/trainer.py: the training. coordinator/handlers/on_end.py: the end of the job.
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
from chaoskit.process.linux import host_id, keep_freed_memory, set_name, step_back
from chaoskit.process.progress_board import Board
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

_REPORT_WAIT_S = 5.0
_NICENESS = 5  # below agents and coordinator, which must notice faults at once


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that an agent passes to a new worker: JSON, by fork or on the command line."""

    worker: str
    node: str
    host: str  # the address at which peers reach this node
    coordinator: CoordinatorAddress  # at the start of the agent
    token: str
    config: RunConfig
    run_directory: str
    journal: str  # file name of this worker's journal, without suffix
    injection: InjectionDoor | None = None  # only in a run with faults


class Control:
    """The control thread, and the connections that it shares with the main thread.

    The thread begins when this is made. In a run with faults that waits for their triggers first.

    Attributes:
        ended: set at the end of the job, just before the process ends.
    """

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
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    def send(self, message: messages.Message) -> None:
        """Send a message to the agent, from any thread. Raise OSError if the agent is gone."""
        with self._send_lock:
            frames.send(self._connection, message)

    def _serve(self) -> None:
        """Handle messages of the agent until it is gone. Then end the process."""
        set_name("ck-control")
        try:
            while True:
                self._handle(frames.receive(self._connection))
        except (OSError, Refused):
            pass  # the agent is gone
        except BaseException:  # noqa: BLE001 - such as no room for another thread
            traceback.print_exc()
        finally:
            os._exit(1)  # a worker must not train without its agent

    def _handle(self, message: Any) -> None:
        """Handle a message of the agent.

        The process ends at the end of the job, or if a plan goes on without this worker.
        """
        if isinstance(message, Plan):
            if message.member(self.spec.worker) is None and self.spec.worker not in message.leavers:
                os._exit(1)  # fenced: the others go on without this worker
            self.callbacks.note_losses(message)
            self.regrouper.offer(message)
        elif isinstance(message, Halt):
            self.halt.give(message.step)
        elif isinstance(message, StopWorker):
            self._dismiss(Dismissed(message.grace_s, message.reason))
        elif isinstance(message, EndJob):
            self.ended.set()
            self.journal.sign_off("the job ended")
            os._exit(0 if message.ok else 1)

    def _dismiss(self, order: Dismissed) -> None:
        """Leave the world, as the others go on without this worker.

        The process ends here if it has no hooks to call. Otherwise the main thread leaves its
        generation, and the agent ends the process when its time is over.
        """
        nothing_to_do = not self.callbacks.on_preempt or self.regrouper.done
        if nothing_to_do or not self.regrouper.dismiss(order):
            self.regrouper.note_left(ordered=True)
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
        """Block here if a fault is planned for a regroup, before the group is built."""
        self.hooks.reach("regroup", self.regrouper.step, plan, me)

    def _formed(self, generation: int) -> None:
        self.send(Formed(self.spec.worker, generation))

    def _failed(self, generation: int, detail: str) -> None:
        """Report that the group of a generation could not be built.

        The process ends if the kernel refuses it threads.
        """
        if any(words in detail for words in _NO_THREADS):
            sys.stderr.write(f"generation {generation} could not be formed here: {detail}\n")
            # only this worker is at fault: all others would wait for it in each generation
            os._exit(1)
        self.send(GroupBroken(self.spec.worker, generation, detail))

    def serve_state(self, replica: Replica) -> Endpoint:
        """Start to serve the state of ``replica`` to peers, and return the endpoint.

        Raises:
            OSError: if the address of this node is not one of this host.
        """
        server = StateServer(replica, self.spec.token, self.spec.host)
        arena_fd = replica.arena.fd if replica.arena is not None else -1
        return Endpoint(host_id(), self.spec.host, server.port, os.getpid(), arena_fd)

    def report_ready(self, endpoint: Endpoint) -> None:
        """Journal and report that this worker is warm and can take a rank.

        Args:
            endpoint: where peers read its state.

        Raises:
            OSError: if the agent is gone.
        """
        config = self.spec.config
        exact = config.reduction == "exact"
        own_fingerprint = fingerprint(
            _job_digests[config.job.path], this_device(config.device), exact=exact
        )
        self.journal.write(
            Event.READY, worker=self.spec.worker, pid=os.getpid(), fingerprint=own_fingerprint
        )
        self.send(WorkerReady(self.spec.worker, self.spec.node, endpoint, own_fingerprint))


#: Messages of Python and gloo if the kernel refuses a thread.
_NO_THREADS = ("can't start new thread", "Resource temporarily unavailable")

#: Digests of job files as they were loaded: workers of a zygote run that version despite edits.
_job_digests: dict[str, str] = {}

#: Job files that were imported without an exception. An exception in an import ends the job, as it
#: occurs on every rank.
_imported_jobs: set[str] = set()


def load_job(job: JobSpec) -> Callable[..., None]:
    """Import the job's file, and return its train function. Exceptions of the import are raised."""
    if job.path not in _job_digests:
        _job_digests[job.path] = source_digest(Path(job.path))
    module = import_job(job)
    imported_sources()  # take the digests before files are edited
    train: Callable[..., None] = getattr(module, job.function)
    _imported_jobs.add(job.path)
    return train


def run_worker(spec: WorkerSpec, connection_fd: int, board_fd: int, bell_fd: int) -> None:
    """Run a worker process: train, report the end or the failure, and exit. Does not return."""
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
    # this thread only: control, rendezvous and transfers must not wait for computation
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))
    exit_status = 1
    try:
        exit_status = _train(spec, control, board)
        control.journal.sign_off("the job ended")
    except Dismissed:
        control.journal.sign_off("it left")
        step_back()
        exit_status = 0
    except BaseException as error:  # noqa: BLE001 - any exception of the user's code is reported
        _report_failure(spec, control, error)
    finally:
        os._exit(exit_status)


def _gpu_of(node: str) -> int:
    """Return the GPU of a node. The nodes of one host share its GPUs by their numbers."""
    number = "".join(letter for letter in node if letter.isdigit()) or "0"
    return int(number) % torch.cuda.device_count()


def _train(spec: WorkerSpec, control: Control, board: Board) -> int:
    """Run the job, wait for its end on all ranks, and return the exit status of the process.

    Exceptions of the job are raised, and BadInput if it enters no transaction.
    """
    context = WorkerContext(
        name=spec.worker,
        config=spec.config,
        journal=control.journal,
        board=board,
        hooks=control.hooks,
        regrouper=control.regrouper,
        callbacks=control.callbacks,
        send=control.send,
        serve_state=control.serve_state,
        report_ready=control.report_ready,
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
        with contextlib.suppress(TrainingHalted):  # as if the script had returned after the step
            train(trainer, **job.options)
        trainer.finish()
    except TrainingOver as over:
        cut_short_by = over.cut_short_by
    if not trainer.took_part:
        raise BadInput(
            "job",
            spec.config.job.path,
            "enter `with trainer.transaction()` at least once: the train function did not",
        )
    board.enter(Phase.DONE)
    replica = trainer.replica
    trainer.journal_state()
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
    """Run a sharded job, wait for its end, and return the exit status of the process.

    Training is resumed if a rank is lost before the end.
    """
    entries = Entries(context, train)
    entries.rehearse(os.getpid())
    while True:
        end = entries.run()
        context.board.enter(Phase.DONE)
        _finish(
            control,
            context,
            end.step,
            end.weights_digest,
            end.state_digest,
            generation=end.formation.plan.generation,
        )
        if entries.is_over(end, control.ended):
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
    """Journal and report that this rank has taken the last step.

    The regrouper then counts the training as over.

    Args:
        weights_digest, state_digest: SHA-256 in hexadecimal digits.
        generation: the generation of the last step in a sharded job, else 0.
        cut_short_by: as in :class:`TrainingOver`.
    """
    context.journal.write(
        Event.FINISHED,
        step=step,
        weights_digest=weights_digest,
        state_digest=state_digest,
        cut_short_by=cut_short_by,
        halted=context.halt.is_obeyed,
        sources=imported_sources(),
    )
    # sent first: a group that this rank then builds with finished ranks is known to be the last
    control.send(WorkerDone(context.name, step, weights_digest, generation, cut_short_by))
    control.regrouper.finish()


def _report_failure(spec: WorkerSpec, control: Control, error: BaseException) -> None:
    """Report an exception of the job to log, journal and agent, and wait to be ended.

    The report says whether the job ends with it. It does for errors that every rank would have.
    Otherwise another worker takes the place of this one. The wait ends after 5 s.
    """
    text = format_failure(error)
    sys.stderr.write(text)
    summary, refused = failure_of(error, spec.config.job.path)
    fatal = (
        isinstance(error, (BadInput, NonFiniteBatch, JobFailed))
        or spec.config.job.path not in _imported_jobs
    )
    with contextlib.suppress(JournalFull):
        control.journal.write(Event.FAILED, error=summary, traceback=text)
    control.journal.sign_off("it failed")  # the agent ends this process once it has the report
    control.send(WorkerFailed(spec.worker, summary, fatal, refused))
    control.ended.wait(_REPORT_WAIT_S)  # the agent ends this process


def main(arguments: list[str]) -> None:
    """Run a worker in a fresh interpreter.

    The arguments are the descriptors of control socket, board and bell. The spec comes on standard
    input.
    """
    connection_fd, board_fd, bell_fd = map(int, arguments)
    run_worker(
        msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec),
        connection_fd,
        board_fd,
        bell_fd,
    )
