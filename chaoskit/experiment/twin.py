"""The twin: the same job and seed, unbroken. Run once, kept by content."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec

import chaoskit
from chaoskit.errors import HarnessError
from chaoskit.experiment.history import History
from chaoskit.experiment.plan import Experiment
from chaoskit.experiment.run import RawRun
from chaoskit.vocabulary import Event


class Twin(msgspec.Struct, frozen=True):
    """What an unbroken run did. ``losses``: by step from 0, None where a batch was skipped."""

    losses: list[float | None]
    weights_digest: str
    samples_digest: str

    @classmethod
    def of(cls, run: RawRun) -> Twin:
        """The twin that ``run`` is.

        Raises:
            HarnessError: if the run was not unbroken.
        """
        history = History(run.records)
        digests = {record["weights_digest"] for record in run.records if record.event == Event.FINISHED}
        if run.end is None or not run.end.ok or len(digests) != 1:
            reason = run.end.reason if run.end else "deadline"
            raise HarnessError(f"the unbroken run of {run.experiment.job} did not complete: {reason}")
        return cls(history.losses(), digests.pop(), history.samples_digest())


class TwinCache:
    """Twins on disk, under a key of all that their numbers depend on."""

    def __init__(self, directory: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME")
        self._directory = directory or (Path(base) if base else Path.home() / ".cache") / "chaoskit" / "twins"

    def get(self, experiment: Experiment) -> Twin | None:
        """The twin of ``experiment``, if it was run before."""
        try:
            return msgspec.json.decode(self._path(experiment).read_bytes(), type=Twin)
        except (OSError, msgspec.MsgspecError):
            return None

    def put(self, experiment: Experiment, twin: Twin) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(experiment)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(twin))
        draft.rename(path)

    def _path(self, experiment: Experiment) -> Path:
        return self._directory / f"{_key(experiment)}.json"


def _key(experiment: Experiment) -> str:
    """Changes with the job's code, its options, the run's numerics, our runtime, torch, Python and the processor."""
    config = experiment.config
    world = config.nodes if config.reduction == "fast" else 0
    numbers = (config.seed, config.shard_count, config.reduction, config.device, config.nonfinite, world)
    digest = hashlib.sha256(repr((config.job.function, sorted(config.job.options.items()), numbers)).encode())
    digest.update(repr((version("torch"), platform.python_version(), _processor())).encode())
    runtime = Path(next(iter(chaoskit.__path__))) / "runtime"
    for path in (*sorted(Path(config.job.path).parent.glob("*.py")), *sorted(runtime.glob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line
    return platform.machine()
