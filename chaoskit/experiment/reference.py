"""The reference: the first steps of a job in plain PyTorch, by a process that shares no code with the runtime.

The twin is made by the runtime that is under test, and has its mistakes: a gradient scaled wrongly in every run is in
both. What is compared here are the losses of the first steps, bit for bit where the sum has one order, else within what
another order of the sum explains: the largest relative difference of two orders, over several seeds, times a margin.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

import chaoskit
from chaoskit import plain
from chaoskit.errors import HarnessError
from chaoskit.experiment.cache import directory_of, machine_facts, write_whole
from chaoskit.experiment.findings import conclude
from chaoskit.experiment.history import History, Step
from chaoskit.experiment.outcome import Check
from chaoskit.experiment.plan import Experiment
from chaoskit.plain import Answer, Request
from chaoskit.vocabulary import Verdict

#: Steps that are compared. A mistake that shows later only is left to the twin, or is one of a recovery.
STEPS = 8
#: Seeds over which two orders of summation are compared.
SEEDS = tuple(range(1, 11))
#: Another order may round so many times worse than the two that were measured.
MARGIN = 4.0
#: Losses are sums of float32 numbers: they may differ by one unit in the last place, whatever was measured.
LEAST = 2.0**-22

NAME = "losses equal the reference's"
DEALT = "an epoch has each sample once"

_TIMEOUT_S = 300.0


class Reference(msgspec.Struct, frozen=True):
    """What plain PyTorch came to.

    Attributes:
        losses: of the first steps.
        allowed: by step, the relative difference that another order of the sum explains; empty: bit for bit.
        reason: why there are no losses, or why no more of them.
        repeated: which sample the run has used twice in one epoch, in words.
    """

    run_id: str = ""
    losses: list[float] = []
    allowed: list[float] = []
    reason: str = ""
    repeated: str = ""

    @property
    def is_there(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.losses)


def reference_of(experiment: Experiment, history: History, directory: Path) -> Reference:
    """Train the first steps of a run in plain PyTorch, with the samples that its journals name.

    Args:
        directory: of the run; the request and the log of the process stay there.

    Raises:
        HarnessError: if the process does not answer.
    """
    if reason := _out_of_reach(experiment):
        return Reference(reason=reason)
    samples = _samples(history)
    if not samples:
        return Reference(reason="the run has not committed its first step")
    config = experiment.unbroken(steps=experiment.steps or len(history.steps)).config
    is_exact = config.reduction == "exact" and not config.job.sharded
    request = Request(config.job, config.seed, samples, [] if is_exact else list(SEEDS))
    answer = _ask(request, directory)
    allowed = [] if is_exact else [max(LEAST, MARGIN * spread) for spread in answer.spread]
    return Reference(answer.run_id, answer.losses, allowed, answer.reason, answer.repeated)


def _out_of_reach(experiment: Experiment) -> str:
    """Why a run has no reference, as far as its plan tells."""
    config = experiment.config
    if config.device != "cpu":
        return f"kernels of {config.device} may round otherwise in another process"
    if config.follow is not None:
        return "the batch follows the world"
    if config.resume:
        return "the run begins with a stored state"
    return ""


def _samples(history: History) -> list[list[list[int]]]:
    """Step -> shard -> samples, of the first steps up to one that is missing or was skipped."""
    found = []
    for number in range(STEPS):
        step = history.steps.get(number)
        if step is None or step.skipped or not (shards := _by_shard(step)):
            break
        found.append(shards)
    return found


def _by_shard(step: Step) -> list[list[int]]:
    """What each shard of a step held; empty if the journals do not tell it of all."""
    found: dict[int, list[int]] = {}
    for record in step.contributions[step.generation].values():
        size = len(record["samples"]) // max(1, len(record["shards"]))
        for place, shard in enumerate(record["shards"]):
            found[shard] = record["samples"][place * size : (place + 1) * size]
    return [found[shard] for shard in sorted(found)] if sorted(found) == list(range(len(found))) else []


def check_reference(losses: list[float | None], reference: Reference) -> Check:
    """Passed if the first losses of the run are those of the reference."""
    for step, (mine, theirs) in enumerate(zip(losses, reference.losses, strict=False)):
        allowed = reference.allowed[step] * max(1.0, abs(theirs)) if reference.allowed else 0.0
        same = mine is not None and (repr(mine) == repr(theirs) or abs(mine - theirs) <= allowed)
        if not same:
            detail = f"step {step}: {mine!r} instead of {theirs!r} in plain PyTorch"
            return Check(name=NAME, verdict=Verdict.FAILED, detail=detail)
    count = len(reference.losses)
    how = "within what another order of the sum explains" if reference.allowed else "bit for bit"
    more = f"; then {reference.reason}" if reference.reason else ""
    return Check(name=NAME, verdict=Verdict.PASSED, detail=f"{count} losses of plain PyTorch, {how}{more}")


def check_dealt(reference: Reference) -> Check:
    """Passed if the run has used no sample twice in one epoch, by the steps that were trained again."""
    problems = [reference.repeated] if reference.repeated else []
    count = len(reference.losses)
    return conclude(DEALT, problems, f"the samples of {count} steps", looked_at=count)


# -- the process --------------------------------------------------------------------------------------------------


def _ask(request: Request, directory: Path) -> Answer:
    """The answer, of an earlier run where code, options, samples and machine are the same."""
    kept = directory_of("references") / f"{_key(request)}.json"
    try:
        answer = msgspec.json.decode(kept.read_bytes(), type=Answer)
    except (OSError, msgspec.MsgspecError):
        answer = _run(request, directory)
        write_whole(kept, msgspec.json.encode(answer))
    return answer


def _run(request: Request, directory: Path) -> Answer:
    source = directory / "reference-request.json"
    write_whole(source, msgspec.json.encode(request))
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="chaoskit-reference-") as scratch:
        target = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", plain.__name__, str(source), str(target)]
        with (directory / "reference.log").open("wb") as log:
            try:
                subprocess.run(command, env=environment, stdout=log, stderr=log, check=True, timeout=_TIMEOUT_S)
                return msgspec.json.decode(target.read_bytes(), type=Answer)
            except subprocess.TimeoutExpired:
                return Answer("", [], reason=f"plain PyTorch took longer than {_TIMEOUT_S:g} s")
            except (OSError, subprocess.CalledProcessError, msgspec.MsgspecError) as error:
                raise HarnessError(
                    f"the reference of {request.job.name} did not answer: {error}; see {log.name}"
                ) from error


def _key(request: Request) -> str:
    """Changes with the request, the job's folder, this reference's own code, what is installed, and the machine."""
    package = Path(next(iter(chaoskit.__path__)))
    digest = hashlib.sha256(msgspec.json.encode(request))
    digest.update(machine_facts().encode())
    for path in (Path(plain.__file__), *sorted(Path(request.job.path).parent.glob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted((package / "fixtures" / "jobs").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]
