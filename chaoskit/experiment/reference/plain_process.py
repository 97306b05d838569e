"""The process that trains a job in plain PyTorch: its request, its time limit, and the cache of its
answers.

-> plain.py: the training itself. experiment/reference/reference.py and floor.py: what is asked.
"""

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
    """Return why plain PyTorch cannot train the job as the run does; empty if it can.

    Only reasons in the plan are known.
    """
    config = experiment.config
    if config.device != "cpu":
        return f"kernels of {config.device} may round otherwise in another process"
    if config.follow is not None:
        return "the batch follows the world"
    if config.resume:
        return "the run begins with a stored state"
    return ""


def samples_of(history: History, steps: int, experiment: Experiment) -> list[list[list[int]]]:
    """Return the samples of the first steps, by step and shard.

    They end before a step that is missing, lacks a shard, or was skipped for a fault. Plain PyTorch
    skips bad batches by itself, but does not know which batch a fault has spoilt.
    """
    is_spoilt = any(isinstance(fault, BadBatch) for fault in experiment.faults)
    samples = []
    for number in range(steps):
        step = history.steps.get(number)
        if step is None or (step.skipped and is_spoilt) or not (shards := _by_shard(step)):
            break
        samples.append(shards)
    return samples


def inputs_digest(experiment: Experiment, samples: list[list[list[int]]]) -> str:
    """Return the BLAKE2b digest of options, seed and samples, which identifies a run."""
    job = experiment.config.job
    inputs = (job.function, sorted(job.options.items()), experiment.config.seed, samples)
    return hashlib.blake2b(msgspec.json.encode(inputs), digest_size=16).hexdigest()


def _by_shard(step: Step) -> list[list[int]]:
    """Return the samples of each shard of a step; empty if the journals do not hold all shards."""
    shards = {shard: samples for shard, samples, _ in step.trained()}
    return (
        [shards[shard] for shard in sorted(shards)]
        if sorted(shards) == list(range(len(shards)))
        else []
    )


def ask(
    request: Request, directory: Path, name: str, undo: UndoLog, *, timeout_s: float = _TIMEOUT_S
) -> PlainAnswer:
    """Return the answer of the process, from the cache if all of its inputs are the same.

    A process that takes too long gives an answer without a run id and with a reason, which is not
    cached.

    Args:
        request: the job, its samples and the orders of summation.
        directory: receives the request and the log of the process.
        name: the name of these two files, and of the cache.
        undo: receives the entry that ends the process if this one is killed.
        timeout_s: the time limit of the process, in seconds.

    Raises:
        HarnessError: if the process fails, or gives no answer that can be read.
    """
    path = directory_of(f"{name}s") / f"{_key(request)}.json"
    with locked(path):
        try:
            answer = msgspec.json.decode(kept(path), type=PlainAnswer)
        except (OSError, msgspec.MsgspecError):
            answer = _run(request, directory, name, undo, timeout_s)
            # without a run id the process ran out of time: another try may succeed
            if answer.run_id:
                keep(path, msgspec.json.encode(answer))
    return answer


def _run(
    request: Request, directory: Path, name: str, undo: UndoLog, timeout_s: float
) -> PlainAnswer:
    """Run the process and return its answer; after a timeout, an answer with that reason.

    Raises:
        HarnessError: if the process fails or gives no answer; its log is named.
    """
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
    """Run the process to its end; it is killed if this process ends before.

    Raises:
        TimeoutExpired: if the process takes too long; it is killed.
        CalledProcessError: if the process fails.
    """
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **one_thread, "TMPDIR": scratch}
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        undo_entry: Undo | None = None
        try:
            undo_entry = undo.plan(KillEntry(process.pid, start_ticks(process.pid)))
            status = process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            if undo_entry is not None:
                undo_entry.done()
    if status:
        raise subprocess.CalledProcessError(status, command)


def _key(request: Request) -> str:
    """Return a key that changes with the request, the code, the packages and the machine."""
    package = Path(next(iter(chaoskit.__path__)))
    digest = hashlib.sha256(msgspec.json.encode(request))
    digest.update(machine_facts().encode())
    for path in (Path(plain.__file__), package / "sketch.py", *request.job.sources()):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted((package / "fixtures" / "jobs").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]
