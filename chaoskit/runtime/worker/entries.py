"""The second rung of the ladder: the train function of a sharded job is entered again, in the same process.

The first entry is a rehearsal in a world of this process alone. It warms every path of a step, so that a replacement is
as fast as anybody from its first step on. After it each generation is an entry: fresh groups, fresh objects, and the
state from copies. An entry that its generation outlives ends with the job. When too many of them in a row committed
nothing the process gives itself up: the third rung is a new one.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable

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
    """This process was entered again and again, and committed nothing. Another one may do better."""


class Entries:
    """Enters the train function until the last step is committed on all ranks.

    Args:
        train: calls the user's function with a trainer.
    """

    def __init__(self, worker: WorkerContext, train: Callable[[ShardedTrainer], None]) -> None:
        self._worker, self._train = worker, train
        at = worker.hooks.injected.breakpoints.reach
        self._compilations = Compilations(
            worker.board
        )  # one for all entries: each would restore what it has seen
        self._copies = Copies(worker.name, worker.board, worker.journal, worker.send, at)
        self._writes = (
            ScriptWrites()
        )  # one for all entries: what the script does is the same in each
        self._last: Formation | None = None  # the generation of the newest entry
        self._cause = ""  # why the last entry was left
        self._barren = 0.0  # entries in a row that committed nothing and failed here; half where another rank was first

    def rehearse(self, pid: int) -> None:
        """Run the function up to the end of its first transaction, and report for duty.

        Raises:
            BadInput: if it enters none.
        """
        self._enter(None)
        gc.collect()  # sharded modules refer to themselves in circles
        gc.freeze()
        worker = self._worker
        worker.ready(
            Endpoint(host_id(), worker.host, 0, pid, -1)
        )  # its agent knows where its state can be read
        worker.board.enter(Phase.REGROUP)

    def run(self) -> tuple[int, str, str]:
        """Train to the end: the last step, and SHA-256 over all ranks' weights and over the whole state.

        Raises:
            Dismissed: if this worker is to end. EntriesSpent: if ``entries_max`` entries in a row committed nothing.
        """
        while True:
            self._worker.board.enter(Phase.REGROUP)
            formation = self._await_membership()
            if formation is self._last:
                self._worker.regrouper.wait_newer(formation)
                continue
            self._last = formation
            self._worker.regrouper.resume()
            generation, rank = formation.plan.generation, formation.me.rank
            self._worker.journal.write(
                Event.ENTERED, generation=generation, rank=rank, cause=self._cause
            )
            commits = self._worker.board.commits
            if (end := self._enter(formation)) is not None:
                return end
            if self._worker.board.commits > commits:
                self._barren = 0.0
            if self._barren >= self._worker.config.entries_max:
                spent = f"{self._barren:g} entries in a row committed nothing; the last one: {self._cause}"
                raise EntriesSpent(spent)

    def _await_membership(self) -> Formation:
        try:
            return self._worker.regrouper.membership()
        except Dismissed:
            self._say_farewell()
            raise

    def _say_farewell(self) -> None:
        """Call the hooks of a worker that is to end, if it is."""
        worker = self._worker
        if (order := worker.regrouper.dismissal) is not None:
            worker.callbacks.preempt(order, worker.regrouper.step)

    @property
    def generation(self) -> int:
        """Of the newest entry."""
        return self._last.plan.generation if self._last is not None else 0

    def is_over(self, ended: threading.Event) -> bool:
        """Wait for the end of the job; False if a rank was lost before that, and the last steps must be repeated."""
        regrouper = self._worker.regrouper
        assert self._last is not None
        while not ended.is_set():
            if regrouper.wait_newer(self._last, _LOOK_S):
                return False
        return True

    def _enter(self, formation: Formation | None) -> tuple[int, str, str] | None:
        """One entry. None if it was left to be entered again, else the end."""
        worker, trainer = self._worker, None
        worker.callbacks.forget()
        try:
            group = None
            if formation is not None:
                worker.board.place(formation.plan.generation, formation.me.rank)
                worker.board.progress(
                    0
                )  # of this entry: the ranks that wait for this one are not behind it
                group = worker.regrouper.group(formation)
                worker.board.enter(Phase.OUTSIDE)
            alone = formation is None or len(formation.plan.members) == 1
            parts = self._copies, self._compilations, self._writes
            trainer = ShardedTrainer(worker, *parts, formation, None if alone else group)
            with contextlib.suppress(TrainingHalted):
                self._train(trainer)
            if formation is None:
                remedy = "enter `with trainer.transaction()` at least once: it never trained"
                raise BadInput("job", worker.config.job.path, remedy)
            trainer.finish()
            digests = trainer.agree_on_end()
            trainer.copy_last()
            return trainer.step, *digests
        except (Reentry, GenerationSuperseded) as error:
            self._cause = str(error) or "a newer membership"
            return None
        except Exception as error:
            if trainer is None:
                raise
            self._barren += trainer.give_up(error)
            self._cause = f"{type(error).__name__}: {error}"[:200]
            return None
        finally:
            if trainer is not None:
                self._say_farewell()  # while the objects that its hooks know are still there
                trainer.leave()
