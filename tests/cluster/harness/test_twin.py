"""The twin of a run, the unbroken run that it is compared with: truly unbroken, and made by the
current code.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chaoskit
from chaoskit.errors import HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.twin.twin import Interrupted, Twin, TwinCache, numerics_digest
from chaoskit.pytest_plugin import Chaos
from chaoskit.runtime.worker.sources import imported_sources
from chaoskit.wire.messages import Heartbeat, WorkerReady

TROUBLED = str(Path(__file__).parents[2] / "jobs" / "failing" / "troubled.py")
UNFAITHFUL = str(Path(__file__).parents[2] / "jobs" / "wrong" / "unfaithful.py")
STEPS = 20


@pytest.fixture
def twins(tmp_path: Path) -> TwinCache:
    return TwinCache(tmp_path / "twins")


@pytest.fixture
def harness(chaos: Chaos, tmp_path: Path, twins: TwinCache) -> Iterator[Harness]:
    """Return a harness with an empty cache of twins."""
    harness = Harness(chaos.harness.host, tmp_path / "runs", twins)
    yield harness
    harness.close()


class Killer:
    """A watcher that kills a rank in the middle of each of the first ``runs`` runs."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._pids: dict[str, int] = {}

    def __call__(self, message: Any) -> None:
        if isinstance(message, WorkerReady):
            self._pids[message.worker] = message.endpoint.pid
        if not isinstance(message, Heartbeat) or not self._runs:
            return
        for beat in message.beats:
            if beat.worker == "node1.0" and beat.commits >= 3 and beat.worker in self._pids:
                self._runs -= 1
                os.kill(self._pids.pop(beat.worker), signal.SIGKILL)


def plan(job: str = f"{TROUBLED}:plain", **settings: Any) -> Experiment:
    return plan_experiment(
        job,
        **{"nodes": 2, "steps": STEPS, "options": {"step_s": 0.02}, "deadline_s": 60.0} | settings,
    )


def runs_of(harness: Harness) -> int:
    return len(list(harness.directory.iterdir()))


# -- unbroken --------------------------------------------------------------------------------------


@pytest.mark.promise("is no twin, however well it recovered: it is run again, once")
def test_a_twin_that_lost_a_rank_is_run_again(harness: Harness, twins: TwinCache) -> None:
    """A twin that recovered from a loss is run again, although its numbers are right."""
    twin = harness.twin(plan(), Killer(runs=1))
    assert runs_of(harness) == 2
    assert len(twin.losses) == STEPS
    assert twins.get(plan()) == twin


def test_a_twin_that_breaks_again_is_an_error(harness: Harness, twins: TwinCache) -> None:
    with pytest.raises(
        Interrupted,
        match=r"was disturbed without a fault: detected node1\.0: exited .*run it again",
    ):
        harness.twin(plan(), Killer(runs=2))
    assert runs_of(harness) == 2
    assert twins.get(plan()) is None


def test_a_twin_that_fails_by_its_job_is_not_run_again(harness: Harness) -> None:
    """A twin of code that raises on every rank is an error at once."""
    with pytest.raises(HarnessError, match="did not complete"):
        harness.twin(plan(f"{UNFAITHFUL}:fails_everywhere", options={}, max_failures=2))
    assert runs_of(harness) == 1


# -- of the current code ---------------------------------------------------------------------------

JOB = """
import torch
from torch import nn

from parts.layers import hidden

DATA = torch.arange(256, dtype=torch.float32).view(64, 4) / 256

def train(trainer, steps):
    from parts.rates import RATE  # late
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(hidden(), nn.Linear(8, 1))
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=8):
                step.backward(model(shard.batch).square().mean())
"""
LAYERS = "from torch import nn\n\ndef hidden():\n    return nn.Linear(4, 8)\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the path of a job of three files, two of them in a package beside it."""
    path = tmp_path / "code" / "job.py"
    (path.parent / "parts").mkdir(parents=True)
    path.write_text(JOB)
    (path.parent / "parts" / "layers.py").write_text(LAYERS)
    (path.parent / "parts" / "rates.py").write_text("RATE = 0.1\n")
    return path


@pytest.mark.parametrize(
    "part", ["runtime/step/trainer.py", "runtime/injection/clock.py", "elastic/scaling.py"]
)
def test_an_edit_of_the_runtime_is_another_twin(tmp_path: Path, part: str) -> None:
    """An edit of any module that the numbers depend on, in any folder, changes the digest."""
    package = tmp_path / "chaoskit"
    shutil.copytree(next(iter(chaoskit.__path__)), package)
    before = numerics_digest(package)
    assert (package / part).is_file()
    with (package / part).open("a") as file:
        file.write("\n# edited\n")
    assert numerics_digest(package) != before


@pytest.mark.promise(
    "their digests are kept with the twin, and compared before it is used", helper="parts/rates.py"
)
@pytest.mark.parametrize(
    ("helper", "text"),
    # of another size: with equal size and second, Python would use the old bytecode
    [
        ("parts/layers.py", LAYERS.replace("8)", "8, bias=False)")),
        ("parts/rates.py", "RATE = 0.25\n"),
    ],
)
def test_another_helper_is_another_twin(
    harness: Harness, job: Path, helper: str, text: str
) -> None:
    """An edit of any helper of the job, whenever it is imported, makes another twin."""
    experiment = plan(str(job), options={}, steps=10)
    first = harness.twin(experiment)
    assert harness.twin(experiment) == first
    assert runs_of(harness) == 1
    (job.parent / helper).write_text(text)
    second = harness.twin(experiment)
    assert runs_of(harness) == 2
    assert second.losses != first.losses


def test_a_job_elsewhere_has_a_twin_of_its_own(harness: Harness, job: Path, tmp_path: Path) -> None:
    """A copy of a job imports the helpers of its own folder, and has its own twin."""
    first = harness.twin(plan(str(job), options={}, steps=10))
    copy = shutil.copytree(job.parent, tmp_path / "copy") / job.name
    (copy.parent / "parts" / "rates.py").write_text("RATE = 0.25\n")
    second = harness.twin(plan(str(copy), options={}, steps=10))
    assert second.losses != first.losses
    assert harness.twin(plan(str(copy), options={}, steps=10)) == second
    assert harness.twin(plan(str(job), options={}, steps=10)) == first
    assert runs_of(harness) == 2


def test_jobs_of_one_folder_have_twins_of_their_own(twins: TwinCache) -> None:
    """Two jobs of one folder have different twins, though both functions are ``train`` with the
    same options.
    """
    twins.put(plan("gpt", options={}), Twin([1.0], "weights", "samples"))
    assert twins.get(plan("llama", options={})) is None
    assert twins.get(plan("gpt", options={})) is not None


def test_only_the_users_files_count(harness: Harness, job: Path) -> None:
    """The sources of a twin omit files of torch and chaoskit: those are in the key, by version and
    digest.
    """
    twin = harness.twin(plan(str(job), options={}, steps=10))
    assert set(twin.sources) == {
        str(job),
        *(str(job.parent / "parts" / name) for name in ("layers.py", "rates.py")),
    }


def test_a_source_that_is_gone_is_no_reason_to_fail(twins: TwinCache, job: Path) -> None:
    experiment = plan(str(job), options={})
    twins.put(
        experiment, Twin([1.0], "weights", "samples", {str(job.parent / "gone.py"): "digest"})
    )
    assert twins.get(experiment) is None


def test_another_version_of_what_is_installed_is_another_twin(
    twins: TwinCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins.put(plan(), Twin([1.0], "weights", "samples"))
    assert twins.get(plan()) is not None
    (tmp_path / "site" / "transformers-99.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    assert twins.get(plan()) is None


def test_sources_are_noted_as_they_were_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit after the import does not change the digest of the code that runs."""
    path = tmp_path / "imported_by_a_job.py"
    path.write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("imported_by_a_job")
    noted = imported_sources()[str(path)]
    path.write_text("A = 2\n")
    assert imported_sources()[str(path)] == noted
