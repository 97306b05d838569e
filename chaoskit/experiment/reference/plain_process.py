"""The process that trains a job in plain PyTorch: what it is asked, and what it answered before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import msgspec

import chaoskit
from chaoskit import plain
from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.reference.cache import (
    directory_of,
    keep,
    kept,
    locked,
    machine_facts,
    write_whole,
)
from chaoskit.faults.numbers.data import BadBatch
from chaoskit.plain import PlainAnswer, Request
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.history import History, Step
from chaoskit.substrate.undo import KillEntry, Undo, UndoLog

_TIMEOUT_S = 300.0


def out_of_reach(experiment: Experiment) -> str:
    """Return why plain PyTorch cannot train the job as a run does, as far as the plan tells; empty if it can."""
    config = experiment.config
    if config.device != "cpu":
        return f"kernels of {config.device} may round otherwise in another process"
    if config.follow is not None:
        return "the batch follows the world"
    if config.resume:
        return "the run begins with a stored state"
    return ""


def samples_of(history: History, steps: int, experiment: Experiment) -> list[list[list[int]]]:
    """Return step -> shard -> samples, of the first steps up to one that is missing, or skipped for a fault.

    Plain PyTorch skips what is bad by itself; of a batch that a fault has spoilt it does not know.
    """
    is_spoilt = any(isinstance(fault, BadBatch) for fault in experiment.faults)
    found = []
    for number in range(steps):
        step = history.steps.get(number)
        if step is None or (step.skipped and is_spoilt) or not (shards := _by_shard(step)):
            break
        found.append(shards)
    return found


def trained(experiment: Experiment, samples: list[list[list[int]]]) -> str:
    """Return which run an answer is of, wherever its job lies: BLAKE2b of options, seed and samples."""
    job = experiment.config.job
    told = (job.function, sorted(job.options.items()), experiment.config.seed, samples)
    return hashlib.blake2b(msgspec.json.encode(told), digest_size=16).hexdigest()


def _by_shard(step: Step) -> list[list[int]]:
    """What each shard of a step held; empty if the journals do not tell it of all."""
    found = {shard: samples for shard, samples, _ in step.trained()}
    return (
        [found[shard] for shard in sorted(found)]
        if sorted(found) == list(range(len(found)))
        else []
    )


def ask(
    request: Request, directory: Path, name: str, undo: UndoLog, *, timeout_s: float = _TIMEOUT_S
) -> PlainAnswer:
    """Return the answer; of an earlier process where code, options, samples and machine are the same.

    One that took too long has no run id.

    Args:
        directory: where the request and the log of the process stay.
        name: of the two files, and of the folder in which answers are kept.
        undo: gets the entry that ends the process if this one cannot.

    Raises:
        HarnessError: if the process does not answer.
    """
    path = directory_of(f"{name}s") / f"{_key(request)}.json"
    with locked(path):
        try:
            answer = msgspec.json.decode(kept(path), type=PlainAnswer)
        except (OSError, msgspec.MsgspecError):
            answer = _run(request, directory, name, undo, timeout_s)
            if answer.run_id:  # else the process had no time, as on a machine that is busy now
                keep(path, msgspec.json.encode(answer))
    return answer


def _run(
    request: Request, directory: Path, name: str, undo: UndoLog, timeout_s: float
) -> PlainAnswer:
    source = directory / f"{name}-request.json"
    write_whole(source, msgspec.json.encode(request))
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=directory) as scratch:
        target = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", plain.__name__, str(source), str(target)]
        with (directory / f"{name}.log").open("wb") as log:
            try:
                _train(command, scratch, log, undo, timeout_s)
                return msgspec.json.decode(target.read_bytes(), type=PlainAnswer)
            except subprocess.TimeoutExpired:
                return PlainAnswer("", [], reason=f"plain PyTorch took longer than {timeout_s:g} s")
            except (OSError, subprocess.CalledProcessError, msgspec.MsgspecError) as error:
                raise HarnessError(
                    f"plain PyTorch did not train {request.job.name} for the {name}: {error}; see {log.name}"
                ) from error


def _train(
    command: list[str], scratch: str, log: IO[bytes], undo: UndoLog, timeout_s: float
) -> None:
    """Run the process, which ends with this one."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "TMPDIR": scratch}
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        planned: Undo | None = None
        try:
            planned = undo.plan(KillEntry(process.pid, start_ticks(process.pid)))
            status = process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            if planned is not None:
                planned.done()
    if status:
        raise subprocess.CalledProcessError(status, command)


def _key(request: Request) -> str:
    """Changes with the request, the job's folder, the process's own code, what is installed, and the machine."""
    package = Path(next(iter(chaoskit.__path__)))
    digest = hashlib.sha256(msgspec.json.encode(request))
    digest.update(machine_facts().encode())
    for path in (Path(plain.__file__), package / "sketch.py", *request.job.sources()):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted((package / "fixtures" / "jobs").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]
