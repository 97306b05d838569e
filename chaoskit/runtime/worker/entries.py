"""Entries into the train function of a sharded job, in the same process after each loss.

The first entry is a rehearsal in a world of this process alone. It warms up every path of a step,
so that a replacement takes its first step as fast as other ranks. Each generation is an entry with
fresh groups, fresh objects, and the state from copies. An entry lasts as long as its generation, or
until the end of the job. If too many entries in a row commit nothing, the process gives up, and a
new one replaces it.

-> step/sharded_trainer.py: one entry; ``give_up`` there judges its exception. worker/process.py:
replicated jobs, which enter the function once.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import NamedTuple

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import host_id
from chaoskit.runtime.group.regroup import Dismissed, Formation
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.runtime.state.copies import Copies
from chaoskit.runtime.state.script_writes import ScriptWrites
from chaoskit.runtime.step.compiling import Compilations
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.halting import TrainingHalted
from chaoskit.runtime.step.sharded_trainer import Reentry, ShardedTrainer
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Endpoint

_LOOK_S = 0.05


class EntriesSpent(ChaoskitError):
    """This process has entered the function too often without a commit.

    A new process may succeed.
    """


class TrainingEnd(NamedTuple):
    """The end of the training, the same on all ranks of a generation.

    Attributes:
        formation: the generation that has taken the last step.
        step: the number of committed steps.
        weights_digest: SHA-256, in hexadecimal digits, over the weights of all ranks.
        state_digest: the same over the whole state.
    """

    formation: Formation
    step: int
    weights_digest: str
    state_digest: str


class Entries:
    """Enters the train function until the last step is committed on all ranks.

    Args:
        train: calls the user's function with a trainer.
    """

    def __init__(self, worker: WorkerContext, train: Callable[[ShardedTrainer], None]) -> None:
        self._worker, self._train = worker, train
        reach_boundary = worker.hooks.injected.breakpoints.reach
        self._compilations = Compilations(worker.board)  # one per process
        self._copies = Copies(
            worker.name, worker.board, worker.journal, worker.send, reach_boundary
        )
        self._writes = ScriptWrites()  # one for all entries, as each runs the same script
        self._last_formation: Formation | None = None  # the generation of the newest entry
        self._exit_cause = ""  # the reason why the last entry was left
        self._failed_entries = 0.0  # failed entries in a row; one half if another rank failed first

    def rehearse(self, pid: int) -> None:
        """Run the function up to the end of its first transaction, and report this worker as ready.

        Args:
            pid: the id of this process, to be reported.

        Raises:
            BadInput: if it enters no transaction. Other exceptions of the job are raised as well.
        """
        self._enter(None)
        gc.collect()  # sharded modules refer to themselves in circles
        gc.freeze()
        worker = self._worker
        worker.report_ready(
            Endpoint(host_id(), worker.host, 0, pid, -1)
        )  # the agent serves its state
        worker.board.enter(Phase.REGROUP)

    def run(self) -> TrainingEnd:
        """Train until the last step is committed on all ranks, and return the end.

        Raises:
            Dismissed: if this worker must end.
            EntriesSpent: if failed entries without a commit between them add up to ``entries_max``.
                One counts half if another rank failed first.
            Exception: of the job, if no newer generation explains it.
        """
        while True:
            self._worker.board.enter(Phase.REGROUP)
            formation = self._await_membership()
            if formation is self._last_formation:
                self._worker.regrouper.wait_newer(formation)
                continue
            self._last_formation = formation
            self._worker.regrouper.resume()
            generation, rank = formation.plan.generation, formation.me.rank
            self._worker.journal.write(
                Event.ENTERED, generation=generation, rank=rank, cause=self._exit_cause
            )
            commits = self._worker.board.commits
            if (end := self._enter(formation)) is not None:
                return end
            if self._worker.board.commits > commits:
                self._failed_entries = 0.0
            if self._failed_entries >= self._worker.config.entries_max:
                raise EntriesSpent(
                    f"{self._failed_entries:g} entries into the train function in a row committed "
                    f"no step; the last one ended with: {self._exit_cause}"
                )

    def _await_membership(self) -> Formation:
        """Return the newest membership, once its members have exchanged their steps.

        Raises:
            Dismissed: if this worker must end; its hooks were called.
        """
        try:
            return self._worker.regrouper.membership()
        except Dismissed:
            self._call_preempt_hooks()
            raise

    def _call_preempt_hooks(self) -> None:
        """Call the ``on_preempt`` hooks if this worker must end, else do nothing."""
        worker = self._worker
        if (order := worker.regrouper.dismissal) is not None:
            worker.callbacks.preempt(order, worker.regrouper.step)

    def is_over(self, end: TrainingEnd, ended: threading.Event) -> bool:
        """Wait until ``ended`` is set, which is the end of the job, and return True.

        Return False if a rank is lost before, so that the last steps must be repeated.

        Args:
            end: the result of :meth:`run`.
        """
        regrouper = self._worker.regrouper
        while not ended.is_set():
            if regrouper.wait_newer(end.formation, _LOOK_S):
                return False
        return True

    def _enter(self, formation: Formation | None) -> TrainingEnd | None:
        """Run one entry: in the groups of ``formation``, or a rehearsal for None.

        Return the end of the training, or None if the function must be entered again. Exceptions
        that the end of the generation does not explain are raised.

        Raises:
            BadInput: if the function returns from a rehearsal, so that it entered no transaction.
        """
        worker, trainer = self._worker, None
        worker.callbacks.forget()
        try:
            group = None
            if formation is not None:
                worker.board.place(formation.plan.generation, formation.me.rank)
                # the progress of this entry: ranks that wait for this one are not behind it
                worker.board.progress(0)
                group = worker.regrouper.group(formation)
                worker.board.enter(Phase.OUTSIDE)
            is_alone = formation is None or len(formation.plan.members) == 1
            parts = self._copies, self._compilations, self._writes
            trainer = ShardedTrainer(worker, *parts, formation, None if is_alone else group)
            with contextlib.suppress(TrainingHalted):
                self._train(trainer)
            if formation is None:
                remedy = (
                    "enter `with trainer.transaction()` at least once: the train function did not"
                )
                raise BadInput("job", worker.config.job.path, remedy)
            trainer.finish()
            digests = trainer.agree_on_end()
            trainer.copy_last()
            return TrainingEnd(formation, trainer.step, *digests)
        except (Reentry, GenerationSuperseded) as error:
            self._exit_cause = str(error) or "a newer membership"
            return None
        except Exception as error:
            if trainer is None:
                raise
            self._failed_entries += trainer.give_up(error)
            self._exit_cause = f"{type(error).__name__}: {error}"[:200]
            return None
        finally:
            if trainer is not None:
                self._call_preempt_hooks()  # before the objects are dropped that the hooks refer to
                trainer.leave()
