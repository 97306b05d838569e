"""A job that sabotages the runtime in its own processes, to violate each property."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal
from chaoskit.runtime.state.peer import Corrupt
from chaoskit.runtime.step import trainer as trainer_module
from chaoskit.runtime.worker.fingerprint import fingerprint
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import WorkerReady

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
BATCH = 24
AT = 8  # the step of most faults
NAP_S = 1.8
HUNG_S = (
    25.0  # a rank that hangs this long is given up, even before its step time is learned (10 s)
)


def generation(trainer: Any) -> int:
    """Return the generation in which this process trains; 0 before the first."""
    return trainer._formation.plan.generation if trainer._formation else 0


def rewrite(
    trainer: Any, event: Event, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Make the process write other records of ``event``, or none."""
    journal = trainer._worker.journal
    write = journal.write

    def lie(kind: Event, **fields: Any) -> None:
        changed = change(fields) if kind == event else fields
        if changed is not None:
            write(kind, **changed)

    journal.write = lie


# -- the sabotages: each is called once the job is registered --------------------------------------


def none(trainer: Any) -> None:
    """Sabotage nothing."""


def skips_a_shard(trainer: Any) -> None:
    """Leave out the contribution of rank 1 in one step; the others commit all the same."""

    def change(fields: dict[str, Any]) -> dict[str, Any]:
        return (
            fields | {"shards": [], "samples": []}
            if trainer.rank == 1 and fields["step"] == AT
            else fields
        )

    rewrite(trainer, Event.REDUCE, change)


def ignores_new_generations(trainer: Any) -> None:
    """Record commits under the first generation's number, whichever trains."""
    rewrite(trainer, Event.COMMIT, lambda fields: fields | {"generation": 1})


def takes_two_steps(trainer: Any) -> None:
    """Run the optimizer of rank 1 twice in one step."""
    replica = trainer.replica
    advance = replica.advance

    def twice() -> None:
        advance()
        if trainer.rank == 1 and trainer.step == AT and trainer.took_part:
            advance()

    replica.advance = twice


def samples_anew(trainer: Any) -> None:
    """Begin the data again from the start after a recovery."""
    trainer._work.sampler = _sampler(
        trainer, lambda sampler, step, shard: sampler.samples(step - AT, shard)
    )


def deals_half_twice(trainer: Any) -> None:
    """Deal one of each two samples twice, and the other never, after a recovery."""
    trainer._work.sampler = _sampler(
        trainer,
        lambda sampler, step, shard: [sample & ~1 for sample in sampler.samples(step, shard)],
    )


def shrinks_the_batch(trainer: Any) -> None:
    """Deal one sample less per shard after a recovery."""
    trainer._work.sampler = _sampler(
        trainer, lambda sampler, step, shard: sampler.samples(step, shard)[:-1]
    )


def _sampler(trainer: Any, deal: Callable[[Any, int, int], list[int]]) -> Callable[[int, int], Any]:
    make = trainer._work.sampler

    class Dealer:
        def __init__(self, size: int, batch_size: int) -> None:
            self._sampler = make(size, batch_size)

        def samples(self, step: int, shard: int) -> list[int]:
            recovered = generation(trainer) > 1
            return (
                deal(self._sampler, step, shard)
                if recovered
                else self._sampler.samples(step, shard)
            )

    return Dealer


def seeds_by_process(trainer: Any) -> None:
    """Seed dropout by the process, and not by step and shard, after a recovery."""
    seed_everything = trainer_module.seed_everything
    trainer_module.seed_everything = lambda *key: seed_everything(
        *key, *([os.getpid()] if generation(trainer) > 1 else [])
    )


def forgets_momentum(trainer: Any) -> None:
    """Let a replacement take over the weights without the optimizer's moments."""
    pull = trainer_module.pull

    def half(replica: Any, *arguments: Any, **more: Any) -> Any:
        pulled = pull(replica, *arguments, **more)
        for path, tensor in replica.tensors():
            if path.endswith("/exp_avg"):
                tensor.zero_()
        return pulled

    trainer_module.pull = half


def trusts_any_copy(trainer: Any) -> None:
    """Load a copy although its checksum is wrong."""
    pull = trainer_module.pull

    def careless(
        replica: Any, endpoint: Any, token: str, transport: str, sealed: str, **more: Any
    ) -> Any:
        time.sleep(0.3 if sealed else 0.0)  # the test damages the copies first
        try:
            return pull(replica, endpoint, token, transport, sealed, **more)
        except Corrupt:
            return pull(replica, endpoint, token, transport, "", **more)

    trainer_module.pull = careless


def does_not_look_at_numbers(trainer: Any) -> None:
    """Report every sum as finite."""
    reduce = trainer._work.reduce
    trainer._work.reduce = lambda *given, **more: dataclasses.replace(
        reduce(*given, **more), finite=True
    )


def does_not_compare(trainer: Any) -> None:
    """Exchange seals without comparing them."""
    trainer._inquiry.must_not_commit = lambda formation, seals: False


def does_not_hear_its_verdict(trainer: Any) -> None:
    """Let rank 1 commit against the verdict of the others, before they can have it replaced."""
    inquiry = trainer._inquiry
    must_not_commit, accuse = inquiry.must_not_commit, inquiry.accuse

    def accuse_late(*given: Any, **more: Any) -> None:
        time.sleep(0.5)
        accuse(*given, **more)

    inquiry.must_not_commit = lambda formation, seals: (
        trainer.rank != 1 and must_not_commit(formation, seals)
    )
    inquiry.accuse = accuse_late


def goes_back_a_step(trainer: Any) -> None:
    """Let the survivors of a loss forget that they have committed the last step, and take it again."""
    regrouper = trainer._worker.regrouper
    offer = regrouper.offer

    def forgetful(plan: Any) -> None:
        if plan.generation == 2:
            regrouper.step -= 1
            trainer.replica.step -= 1
        offer(plan)

    regrouper.offer = forgetful


def spares_the_guilty(trainer: Any) -> None:
    """Keep the name of a guilty rank from the coordinator, so that all wait for a plan that never
    comes.
    """
    trainer._inquiry.accuse = lambda *given, **more: None


def looks_busy_for_ever(trainer: Any) -> None:
    """Show a declared long phase on the progress board while the rank computes."""
    board = trainer._worker.board
    enter = board.enter
    shown = {Phase.FORWARD: Phase.LONG, Phase.BACKWARD: Phase.LONG, Phase.OPTIMIZER: Phase.LONG}
    board.enter = lambda phase: enter(shown.get(phase, phase))


def declares_nothing(trainer: Any) -> None:
    """Show computation on the progress board during a declared long phase."""

    def evaluate(name: str) -> Any:
        trainer._worker.board.enter(Phase.FORWARD)
        return nullcontext()

    trainer.long_phase = evaluate


def leaves_late(trainer: Any) -> None:
    """Let the survivors of a loss stay in their collective for a while after the new plan."""
    regrouper = trainer._worker.regrouper
    offer = regrouper.offer

    def slowly(plan: Any) -> None:
        if plan.generation == 2:
            time.sleep(NAP_S)
        offer(plan)

    regrouper.offer = slowly


def believes_the_clock(trainer: Any) -> None:
    """End the job when the time of day is not the expected one."""
    begun_s = time.time()

    def check() -> float:
        if abs(time.time() - begun_s) > 600:
            raise TimeoutError("ten minutes have passed")
        return 0.0

    trainer.delay_s = check


def is_slandered(trainer: Any) -> None:
    """Hang rank 1 in the step after a fault made it a little slow."""
    trainer.delay_s = lambda: (
        HUNG_S * (generation(trainer) == 1 and trainer.rank == 1 and trainer.step == AT)
    )


def evaluates(trainer: Any) -> None:
    """Let rank 1 evaluate for long, with a declaration that has no effect."""
    declares_nothing(trainer)
    trainer.evaluate_s = HUNG_S


def skips_the_rehearsal(trainer: Any) -> None:
    """Report the worker as ready before its rehearsal."""
    worker, advance = trainer._worker, trainer.replica.advance
    spec = {"worker": worker.name, "node": worker.name.rpartition(".")[0]}
    mark = fingerprint("", torch.device("cpu"))

    def ready(endpoint: Any) -> None:
        worker.send(WorkerReady(endpoint=endpoint, fingerprint=mark, **spec))
        trainer.replica.advance = shown

    def shown() -> None:
        advance()
        worker.journal.write(Event.READY, worker=worker.name, pid=os.getpid(), fingerprint=mark)
        trainer.replica.advance = advance

    worker.report_ready = ready


def computes_otherwise(trainer: Any) -> None:
    """Record other numeric settings for each worker than those sent to the coordinator."""
    rewrite(
        trainer, Event.READY, lambda fields: fields | {"fingerprint": f"threads {fields['pid']}"}
    )


def commits_what_it_likes(trainer: Any) -> None:
    """Record another result of one step on rank 1 than on all others."""

    def change(fields: dict[str, Any]) -> dict[str, Any]:
        odd = fields["rank"] == 1 and fields["step"] == AT
        return fields | {"grad_sum": fields["grad_sum"] + 1} if odd else fields

    rewrite(trainer, Event.COMMIT, change)


def train(
    trainer: Any,
    *,
    steps: int,
    how: str = "none",
    step_s: float = 0.02,
    until: dict[str, Any] | None = None,
) -> None:
    """Train faithfully, except for one of the functions above.

    Args:
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=0.05)
    trainer.delay_s, trainer.evaluate_s = (lambda: 0.0), 0.0
    globals()[how](trainer)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        if trainer.evaluate_s and trainer.step == AT and trainer.rank == 1:
            with trainer.long_phase("evaluation"):
                time.sleep(trainer.evaluate_s)
        with trainer.transaction() as step:
            goal.pace(step_s + trainer.delay_s())
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward(model(shard.batch).square().mean())
