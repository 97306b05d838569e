"""The twin of a job: an unbroken run with the same job and seed, run once and cached by content.

-> experiment/harness.py: when a twin is run, and run again once. experiment/plan/plan.py
(unbroken): its settings. experiment/judge/comparison.py compares a run with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import msgspec

import chaoskit
from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.properties import RunTrace, check_properties
from chaoskit.experiment.properties.base import Kind
from chaoskit.experiment.reference.cache import directory_of, keep, kept, locked, machine_facts
from chaoskit.experiment.reference.ending import Numbers, ending, scalars
from chaoskit.experiment.run.recovery_timeline import raised_by_job
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runtime.worker.sources import source_digest
from chaoskit.vocabulary import Event, Verdict

_FORM = 7  # format of cached twins; raised when older twins must not be used any more
_DISTURBANCES = (
    Event.POD_TAKEN,
    Event.DETECTED,
    Event.NODE_LOST,
    Event.CORRUPT,
    Event.RESUMED,
    Event.RECORD_LOST,
)


class Interrupted(HarnessError):
    """Error: a run without faults was disturbed, so that it is no twin.

    It lost a rank, a node, a pod or the coordinator, found corrupt data, changed its members, or
    violated a liveness property. The training of a command began again.
    """


class UnbrokenFailed(HarnessError):
    """Error: the job fails although no fault struck.

    Attributes:
        run: the records of the run.
    """

    def __init__(self, run: RawRun, reason: str) -> None:
        self.run = run
        super().__init__(
            f"the unbroken run of {run.experiment.job} did not complete as it must: {reason}"
        )


class Twin(msgspec.Struct, frozen=True):
    """The result of an unbroken run of a job.

    Attributes:
        losses: the loss of each step, None for a batch that was skipped.
        weights_digest: SHA-256 of the final weights.
        samples_digest: the digest of the samples in their order.
        sources: path -> digest of each file of the user's code that the job imported.
        run_id: the id of the run.
        ending: path of a tensor of the final state -> its numbers; empty if no rank described it.
        scalars: the digest of the parts of the final state that are not tensors; "" if ranks have
            none, or differ.
        state_digest: the digest of all bits of all tensors with which ranks ended; "" if ranks
            differ.
        nan_steps: the steps with a NaN loss, which JSON would confuse with a skipped batch.
    """

    losses: list[float | None]
    weights_digest: str
    samples_digest: str
    sources: dict[str, str] = {}
    run_id: str = ""
    ending: dict[str, Numbers] = {}
    scalars: str = ""
    state_digest: str = ""
    nan_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for step in self.nan_steps:
            self.losses[step] = math.nan

    @classmethod
    def of(cls, run: RawRun) -> Twin:
        """Return the twin that follows from an unbroken run.

        Raises:
            Interrupted: if :func:`interruptions` finds a sign, such as the loss of a rank, however
                well the runtime recovered.
            UnbrokenFailed: if the job ended before its last step, or violated a safety property.
            HarnessError: if the run did not end in time, or ranks ended with different weights.
        """
        history, job = History(run.records), run.experiment.job
        if run.end is None:
            limit_s = run.experiment.deadline_s
            raise HarnessError(
                f"the unbroken run of {job} did not complete within its deadline of {limit_s:g} s"
            )
        if not run.end.ok:
            raise UnbrokenFailed(run, run.end.reason)
        if problems := interruptions(run, history):
            loss_records = [record for record in run.records if record.event == Event.DETECTED]
            raised_losses, other_losses = raised_by_job(loss_records, run.records)
            remedy = (
                "correct the job"
                if raised_losses and not other_losses
                else "run it again on an idle machine"
            )
            remedy = f"see {run.directory}, and {remedy}"
            raise Interrupted(
                f"the unbroken run of {job} was disturbed without a fault: {'; '.join(problems)}; {remedy}"
            )
        if errors := mistakes(run, history):
            raise UnbrokenFailed(run, "; ".join(errors))
        end_records = [record for record in run.records if record.event == Event.FINISHED]
        digests = {record["weights_digest"] for record in end_records}
        if len(digests) != 1:
            raise HarnessError(
                f"the unbroken run of {job} ended with {len(digests)} different sets of weights"
            )
        sources = {
            path: digest
            for record in end_records
            for path, digest in record.get("sources", {}).items()
        }
        states = {record["state_digest"] for record in end_records}
        final_state = (
            ending(run.records),
            scalars(run.records),
            states.pop() if len(states) == 1 else "",
        )
        losses = history.losses()
        nan_steps = tuple(
            step for step, loss in enumerate(losses) if loss is not None and math.isnan(loss)
        )
        return cls(
            losses,
            digests.pop(),
            history.samples_digest(),
            sources,
            run.run_id,
            *final_state,
            nan_steps,
        )


def interruptions(run: RawRun, history: History) -> list[str]:
    """Return in words the first three signs of a disturbance.

    They are losses, coordinators that took over, and corrupt data before the end of the job.
    Changes of the members and violated liveness properties are signs, too. The list is empty if
    there are none.
    """
    trace = RunTrace(run, history, [])
    signs = [
        f"{record.event} {_about(record)}: {record.get('cause', '')} {record.get('detail', '')}"
        for record in trace.of(*_DISTURBANCES)
        if record.t_ns < trace.end_ns
    ]
    # a plan with the same members is no change
    changes = sum(before != after for before, after in pairwise(trace.members.values()))
    signs += [f"its members changed {changes} times"] if changes else []
    signs += _violated(trace, "liveness")
    return signs[:3]


def _about(record: Record) -> str:
    """Return the worker, node or process that a record is about."""
    return str(
        record.get("worker")
        or (record["node"] if record.event == Event.POD_TAKEN else record.source)
    )


def mistakes(run: RawRun, history: History) -> list[str]:
    """Return in words the first three errors of the runtime that an unbroken run shows.

    They are contradictions between commits, missing and repeated samples, and violated safety
    properties. The list is empty if there are none.
    """
    ledger = history.ledger(run.experiment.config.shards_of)
    problems = [
        *history.violations(run.experiment.config.reduction),
        *ledger.missing,
        *ledger.repeated,
    ]
    return [*problems, *_violated(RunTrace(run, history, []), "safety")][:3]


def _violated(trace: RunTrace, kind: Kind) -> list[str]:
    """Return in words the violations of the properties of a kind."""
    checks = [check for rule, check in check_properties(trace) if rule.kind == kind]
    return [check.detail for check in checks if check.verdict != Verdict.PASSED]


class TwinCache:
    """A cache of twins on disk, keyed by all inputs of a job that are known before a run.

    The files that a job imports are known after the run: their digests are stored with the twin and
    compared before it is used again. Data that a job reads, and its environment variables, are not
    known. Change an option of the job when one of them changes.

    Args:
        directory: the directory of the files; None for the user's cache.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or directory_of("twins")

    def get(self, experiment: Experiment) -> Twin | None:
        """Return the cached twin of ``experiment`` if the job's code is unchanged, else None.

        A cached twin that cannot be read gives None, too.
        """
        try:
            twin = msgspec.json.decode(kept(self._path(experiment)), type=Twin)
        except (OSError, msgspec.MsgspecError):
            return None
        return (
            twin
            if _are_current({Path(path): digest for path, digest in twin.sources.items()})
            else None
        )

    @contextmanager
    def lock(self, experiment: Experiment) -> Iterator[None]:
        """Hold the lock of a twin during a ``with`` block; other processes of the machine wait."""
        with locked(self._path(experiment)):
            yield

    def put(self, experiment: Experiment, twin: Twin) -> None:
        """Store the twin of ``experiment`` on disk, or in memory if it cannot be written."""
        keep(self._path(experiment), msgspec.json.encode(twin))

    def _path(self, experiment: Experiment) -> Path:
        """Return the path of the twin of an experiment."""
        return self._directory / f"{_key(experiment)}.json"


class SessionTwins:
    """A cache, in memory, of twins made on other machines: their numbers depend on the processor.

    Args:
        local_path_of: returns the local path of a file that a job has imported on the other
            machine.
    """

    def __init__(self, local_path_of: Callable[[str], Path] = Path) -> None:
        # key -> twin, and local path -> digest of its sources
        self._twins: dict[str, tuple[Twin, dict[Path, str]]] = {}
        self._local_path_of = local_path_of

    def get(self, experiment: Experiment) -> Twin | None:
        """Return the cached twin of ``experiment`` if the job's code is unchanged, else None."""
        twin, sources = self._twins.get(_key(experiment), (None, {}))
        return twin if twin is not None and _are_current(sources) else None

    def clear(self) -> None:
        """Forget all twins, because further runs take place on other machines."""
        self._twins.clear()

    def lock(self, experiment: Experiment) -> AbstractContextManager[None]:
        """Return a context that does nothing: no other process uses this cache."""
        return nullcontext()

    def put(self, experiment: Experiment, twin: Twin) -> None:
        """Store the twin of ``experiment``."""
        sources = {self._local_path_of(path): digest for path, digest in twin.sources.items()}
        self._twins[_key(experiment)] = twin, sources


def _are_current(sources: Mapping[Path, str]) -> bool:
    """Return whether the files that a job imported are unchanged; False if one cannot be read."""
    try:
        return all(source_digest(path) == digest for path, digest in sources.items())
    except OSError:
        return False


def _key(experiment: Experiment) -> str:
    """Return a key that changes with all inputs of the twin's numbers.

    These are the job, its options and folder, the numerical settings of the run, the runtime, the
    installed packages and the machine. The path of the job's file is part of the key: a copy
    elsewhere imports, and may read, the files beside it there.
    """
    config, job = experiment.config, experiment.config.job
    world = config.nodes if config.reduction == "fast" or config.job.sharded else 0
    numeric_settings = (
        config.seed,
        config.shard_count,
        config.reduction,
        config.device,
        config.nonfinite,
        world,
    )
    job_path = str(Path(job.path).resolve())
    digest = hashlib.sha256(
        repr(
            (_FORM, job_path, job.function, sorted(job.options.items()), numeric_settings)
        ).encode()
    )
    digest.update(repr(config.follow).encode() if config.follow else b"")
    digest.update(machine_facts().encode())
    for path in job.sources():
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(numerics_digest(Path(next(iter(chaoskit.__path__)))))
    return digest.hexdigest()[:32]


def numerics_digest(package: Path) -> bytes:
    """Return the SHA-256 of chaoskit's own code that the numbers of a run depend on.

    Args:
        package: the folder of the package ``chaoskit``.
    """
    digest = hashlib.sha256()
    for part in ("runtime", "data", "elastic"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    digest.update((package / "sketch.py").read_bytes())
    return digest.digest()
