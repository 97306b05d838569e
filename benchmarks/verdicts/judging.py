"""Measure the time of the judge for a long run:
``python -m benchmarks.verdicts.judging [--steps 10000] [--losses 500]``.

The journals of a run of four ranks are generated with that many steps and killed ranks, and again
with a tenth of them. Both are read and judged. Prints the seconds, and the ratio of both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import EndJob
from faults import Kill

WORLD, BATCH, MS = 4, 8, 1_000_000


class Run:
    """A writer of the journals of all processes, with a record each millisecond."""

    def __init__(self, directory: Path, steps: int, losses: int) -> None:
        self._directory, self._ns, self._generation = directory / "journal", count(10**9, MS), 1
        self._journals: dict[str, Journal] = {}
        self._numbers = [count() for _ in range(WORLD + 1)]  # of the workers of each node
        every = steps // losses
        faults = [
            Kill(rank=number % WORLD, at_step=every * number + every // 2)
            for number in range(losses)
        ]
        plan = {"nodes": WORLD, "steps": steps, "max_failures": losses + 1, "strikes_max": 0}
        self._experiment = plan_experiment("gpt", faults=faults, options={"size": "tiny"}, **plan)
        self._write(
            "harness", Event.STARTED, "harness", unix_ns=0, run_id="made-up", nodes=WORLD, spares=1
        )
        members = [self._start(node) for node in range(WORLD)]
        spare = self._start(WORLD)
        self._plan(members)
        due = {fault.at_step: (f"fault{number}", fault) for number, fault in enumerate(faults)}
        for step in range(steps):
            if step in due:
                spare = self._lose(members, spare, step, *due[step])
            self._step(members, step)
        for name in members:
            self._write(name, Event.FINISHED, step=steps, weights_digest="a", state_digest="b")
        self._write("coordinator", Event.JOB_ENDED, "coordinator", ok=True, reason="")
        self._write(
            "harness", Event.RUN_ENDED, "harness", reason="ended", ok=True, detail="", exits={}
        )
        for journal in self._journals.values():
            journal.sign_off("the job ended")
        self.raw = RawRun(
            self._experiment, directory, 10**9, next(self._ns), EndJob(ok=True, reason=""), False
        )

    def _write(self, name: str, event: Event, role: str = "worker", **fields: Any) -> int:
        if name not in self._journals:
            self._journals[name] = Journal(
                self._directory, name, role=role, node=name.partition(".")[0]
            )
        t_ns = next(self._ns)
        self._journals[name].write(event, t_ns=t_ns, **fields)
        return t_ns

    def _start(self, node: int) -> str:
        name = f"node{node}.{next(self._numbers[node])}"
        self._write(f"node{node}", Event.WORKER_STARTED, "agent", worker=name, pid=1)
        self._write(name, Event.READY, worker=name, pid=1, fingerprint="")
        return name

    def _plan(self, members: list[str]) -> None:
        ranks = [
            {"rank": r, "worker": w, "node": w.partition(".")[0], "shards": [r]}
            for r, w in enumerate(members)
        ]
        where = {"generation": self._generation}
        self._write(
            "coordinator",
            Event.PLAN,
            "coordinator",
            abort=True,
            members=ranks,
            leavers=[],
            reason="",
            **where,
        )
        for rank, name in enumerate(members):
            self._write(name, Event.ENTERED, rank=rank, cause="", **where)
            self._write(name, Event.REGROUPED, rank=rank, world=WORLD, **where)
        self._write("coordinator", Event.SETTLED, "coordinator", **where)

    def _lose(self, members: list[str], spare: str, step: int, fault: str, kill: Kill) -> str:
        """Record the kill and the replacement of a rank; return the next spare."""
        assert isinstance(kill.rank, int)
        rank, name = kill.rank, members[kill.rank]
        node = name.partition(".")[0]
        place = {"step": step, "rank": rank, "phase": "forward", "generation": self._generation}
        self._write(name, Event.HOOK_STOPPED, fault=fault, **place)
        target = {
            "worker": name,
            "node": node,
            "nodes": [],
            "pid": 1,
            "ticks": 0,
            "waiting": name,
            "done_ns": 0,
        }
        self._write(
            "harness", Event.INJECTED, "harness", fault=fault, what=str(kill), **target, **place
        )
        self._write(
            "coordinator",
            Event.DETECTED,
            "coordinator",
            worker=name,
            rank=rank,
            cause="exited",
            detail="",
        )
        self._write(
            node, Event.WORKER_EXITED, "agent", worker=name, pid=1, how="killed", status="SIGKILL"
        )
        self._write(
            "harness", Event.EVIDENCE, "harness", fault=fault, level="effective", observed="killed"
        )
        members[rank], self._generation = spare, self._generation + 1
        self._plan(members)
        copy = {"size_bytes": 1000, "transport": "auto", "source": "rank 0", "checksum": ""}
        self._write(
            spare, Event.RESTORED, generation=self._generation, rank=rank, step=step, **copy
        )
        following = self._start(int(node.removeprefix("node")))
        self._write("coordinator", Event.SPARE_READY, "coordinator", worker=following)
        return following

    def _step(self, members: list[str], step: int) -> None:
        where = {"step": step, "generation": self._generation}
        for rank, name in enumerate(members):
            first = (step * WORLD + rank) * BATCH
            samples = list(range(first, first + BATCH))
            self._write(
                name,
                Event.REDUCE,
                rank=rank,
                shards=[rank],
                samples=samples,
                dataset=10**9,
                **where,
            )
        fields = {
            "world": WORLD,
            "loss": 1.0 / (step + 1),
            "piece": 0,
            "grad_sum": step,
            "stall_ms": 0.0,
        }
        for rank, name in enumerate(members):
            self._write(name, Event.COMMIT, rank=rank, **fields, **where)


def measure(steps: int, losses: int) -> tuple[int, float, float]:
    """Return the number of records, the seconds of reading them, and the seconds of judging
    them.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory), steps, losses).raw
        begin_s = time.perf_counter()
        records = len(run.records)
        read_s = time.perf_counter() - begin_s
        outcome = judge(run, None, "local")
        judged_s = time.perf_counter() - begin_s - read_s
        if len(outcome.recoveries) != losses:
            raise RuntimeError(
                f"{len(outcome.recoveries)} of {losses} recoveries: {'; '.join(outcome.reasons)}"
            )
        return records, read_s, judged_s


def main() -> None:
    """Measure both runs, and print the result."""
    parser = argparse.ArgumentParser(description="How long the judge takes for a long run.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--losses", type=int, default=500)
    arguments = parser.parse_args()
    parts = [measure(arguments.steps // share, arguments.losses // share) for share in (10, 1)]
    for records, read_s, judged_s in parts:
        print(f"{records:7} records: read in {read_s:.2f} s, judged in {judged_s:.2f} s")
    print(
        f"{parts[1][2] / parts[0][2]:.1f} times as long for {parts[1][0] / parts[0][0]:.1f} times the records"
    )


if __name__ == "__main__":
    main()
