"""The twin: the same job and seed, unbroken. Run once, kept by content."""

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
from chaoskit.experiment.run.run import RawRun
from chaoskit.experiment.run.timeline import raised_by_job
from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runtime.worker.sources import source_digest
from chaoskit.vocabulary import Event, Verdict

_FORM = 7  # of what is kept: raised when twins of before must not be used any more
_STIRS = (
    Event.POD_TAKEN,
    Event.DETECTED,
    Event.NODE_LOST,
    Event.CORRUPT,
    Event.RESUMED,
    Event.RECORD_LOST,
)


class Interrupted(HarnessError):
    """A run that was meant to be unbroken lost something by itself."""


class UnbrokenFailed(HarnessError):
    """The job fails although nothing is broken: ``run`` shows how."""

    def __init__(self, run: RawRun, reason: str) -> None:
        self.run = run
        super().__init__(
            f"the unbroken run of {run.experiment.job} did not complete as it must: {reason}"
        )


class Twin(msgspec.Struct, frozen=True):
    """What an unbroken run did.

    Attributes:
        losses: by step from 0, None where a batch was skipped.
        nan_steps: the steps whose loss is NaN, which JSON would confuse with a batch that was skipped.
        sources: path -> digest of the user's code that it imported.
        run_id: which run it was.
        ending: numbers of each tensor of its final state.
        scalars: digest of what of its final state is no tensor.
        state_digest: of all of its tensors, bit by bit, as ranks ended with them; "" where they differ.
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
        """The twin that ``run`` is.

        Raises:
            Interrupted: if something was lost in it, however well the runtime came back from that.
            UnbrokenFailed: if the job ended without its last step, or what must never happen has happened.
            HarnessError: if the run did not end in time.
        """
        history, job = History(run.records), run.experiment.job
        if run.end is None:
            raise HarnessError(f"the unbroken run of {job} did not complete: deadline")
        if not run.end.ok:
            raise UnbrokenFailed(run, run.end.reason)
        if problems := interruptions(run, history):
            lost = [record for record in run.records if record.event == Event.DETECTED]
            raised, others = raised_by_job(lost, run.records)
            remedy = (
                "mend the job" if raised and not others else "run it again on a machine at rest"
            )
            remedy = f"look into {run.directory}, and {remedy}"
            raise Interrupted(
                f"the unbroken run of {job} was broken by itself: {'; '.join(problems)}; {remedy}"
            )
        if wrong := mistakes(run, history):
            raise UnbrokenFailed(run, "; ".join(wrong))
        ends = [record for record in run.records if record.event == Event.FINISHED]
        digests = {record["weights_digest"] for record in ends}
        if len(digests) != 1:
            raise HarnessError(
                f"the unbroken run of {job} ended with {len(digests)} different sets of weights"
            )
        sources = {
            path: digest for record in ends for path, digest in record.get("sources", {}).items()
        }
        states = {record["state_digest"] for record in ends}
        final = (
            ending(run.records),
            scalars(run.records),
            states.pop() if len(states) == 1 else "",
        )
        losses = history.losses()
        nan_steps = tuple(
            step for step, loss in enumerate(losses) if loss is not None and math.isnan(loss)
        )
        return cls(
            losses, digests.pop(), history.samples_digest(), sources, run.run_id, *final, nan_steps
        )


def interruptions(run: RawRun, history: History) -> list[str]:
    """What shows that ``run`` was not unbroken, in words: losses, new memberships, what came too late."""
    trace = RunTrace(run, history, [])
    found = [
        f"{record.event} {_about(record)}: {record.get('cause', '')} {record.get('detail', '')}"
        for record in trace.of(*_STIRS)
        if record.t_ns < trace.end_ns
    ]
    changes = sum(
        before != after for before, after in pairwise(trace.members.values())
    )  # the same may begin again
    found += [f"its members changed {changes} times"] if changes else []
    found += _violated(trace, "liveness")
    return found[:3]


def _about(record: Record) -> str:
    return str(
        record.get("worker")
        or (record["node"] if record.event == Event.POD_TAKEN else record.source)
    )


def mistakes(run: RawRun, history: History) -> list[str]:
    """What an unbroken run shows of a runtime that is wrong in every run, in words."""
    ledger = history.ledger(run.experiment.config.shards_of)
    found = [
        *history.violations(run.experiment.config.reduction),
        *ledger.missing,
        *ledger.repeated,
    ]
    return [*found, *_violated(RunTrace(run, history, []), "safety")][:3]


def _violated(trace: RunTrace, kind: Kind) -> list[str]:
    """What violates the properties of a kind, in words."""
    checks = [check for one, check in check_properties(trace) if one.kind == kind]
    return [check.detail for check in checks if check.verdict != Verdict.PASSED]


class TwinCache:
    """Twins on disk, under a key of all that their numbers depend on and that is known before a run.

    The files that a job imports are known after it: they are kept with the twin, and compared when it is wanted again.
    Data that a job reads, and its environment variables, are not known at all: after a change of them change an option.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or directory_of("twins")

    def get(self, experiment: Experiment) -> Twin | None:
        """The twin of ``experiment``, if it was run before with the code of today."""
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
        """Held by one process of the machine at a time: others that want the same twin wait until it is there."""
        with locked(self._path(experiment)):
            yield

    def put(self, experiment: Experiment, twin: Twin) -> None:
        keep(self._path(experiment), msgspec.json.encode(twin))

    def _path(self, experiment: Experiment) -> Path:
        return self._directory / f"{_key(experiment)}.json"


class SessionTwins:
    """Twins of runs on other machines, for as long as these are used: numbers depend on the processor.

    Args:
        here: where a file that a job has imported there is on this machine.
    """

    def __init__(self, here: Callable[[str], Path] = Path) -> None:
        self._twins: dict[
            str, tuple[Twin, dict[Path, str]]
        ] = {}  # with the files here, and their digests
        self._here = here

    def get(self, experiment: Experiment) -> Twin | None:
        """The twin of ``experiment``, if it was run before with the code of today."""
        twin, sources = self._twins.get(_key(experiment), (None, {}))
        return twin if twin is not None and _are_current(sources) else None

    def clear(self) -> None:
        """Forget all: runs take place on other machines from now on."""
        self._twins.clear()

    def lock(self, experiment: Experiment) -> AbstractContextManager[None]:
        """No other process has these."""
        return nullcontext()

    def put(self, experiment: Experiment, twin: Twin) -> None:
        sources = {self._here(path): digest for path, digest in twin.sources.items()}
        self._twins[_key(experiment)] = twin, sources


def _are_current(sources: Mapping[Path, str]) -> bool:
    """Whether the files that a job imported are what they were."""
    try:
        return all(source_digest(path) == digest for path, digest in sources.items())
    except OSError:
        return False


def _key(experiment: Experiment) -> str:
    """Changes with the job, its options and folder, the run's numerics, our runtime, what is installed, the machine.

    The job's file is in it by its place: a copy elsewhere imports, and may read, what lies beside it there.
    """
    config, job = experiment.config, experiment.config.job
    world = config.nodes if config.reduction == "fast" or config.job.sharded else 0
    numbers = (
        config.seed,
        config.shard_count,
        config.reduction,
        config.device,
        config.nonfinite,
        world,
    )
    place = str(Path(job.path).resolve())
    digest = hashlib.sha256(
        repr((_FORM, place, job.function, sorted(job.options.items()), numbers)).encode()
    )
    digest.update(repr(config.follow).encode() if config.follow else b"")
    digest.update(machine_facts().encode())
    for path in job.sources():
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(numerics_digest(Path(next(iter(chaoskit.__path__)))))
    return digest.hexdigest()[:32]


def numerics_digest(package: Path) -> bytes:
    """SHA-256 of chaoskit's own code that the numbers of a run depend on, sub-folders included.

    Args:
        package: the folder of the package ``chaoskit``.
    """
    digest = hashlib.sha256()
    for part in ("runtime", "data", "elastic"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    digest.update((package / "sketch.py").read_bytes())
    return digest.digest()
