"""Module names of jobs: packages, relative imports, and processes that a job starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.plan.planfile import recall, save
from chaoskit.job import JobSpec, resolve_job
from chaoskit.pytest_plugin import Chaos
from faults import Kill

TRAIN = """
import os
import subprocess
import sys
import torch
from torch.utils.data import DataLoader
{imports}

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((2,), float(index))


def train(trainer, steps=8, how=""):
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(2, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE))
    loader = None
    if how in ("spawn", "forkserver", "fork"):
        persists = how == "fork"
        loader = DataLoader(Numbers(), 8, num_workers=1, multiprocessing_context=how, persistent_workers=persists)
    elif how == "service":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    elif how == "daemon":
        subprocess.run(["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 &"], check=True)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(Numbers(), batch_size=8):
                step.backward(model(shard.batch).square().mean())
        if loader is not None and trainer.step == steps // 2:
            with trainer.long_phase("evaluation"):
                print("evaluated", sum(len(batch) for batch in loader), flush=True)
"""


def write_package(root: Path) -> None:
    """Write a package with a module that imports a sibling relatively."""
    package = root / "research" / "jobs"
    package.mkdir(parents=True)
    (root / "research" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (root / "research" / "settings.py").write_text("RATE = 1e-3\n")
    (package / "small.py").write_text(TRAIN.format(imports="from ..settings import RATE"))


def test_a_module_is_found_from_the_working_directory_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    job = resolve_job("research.jobs.small", {"how": ""})
    path = tmp_path / "research" / "jobs" / "small.py"
    assert job == JobSpec(
        str(path), "train", "research.jobs.small", {"how": ""}, root=str(tmp_path)
    )
    assert job.name == "research.jobs.small"
    assert "research" not in sys.modules
    monkeypatch.chdir("/")
    assert resolve_job(job.target, job.options) == job, "a saved plan is replayed from anywhere"
    with pytest.raises(BadInput, match="name a reference job"):
        resolve_job("research.jobs.small")


def test_a_package_stands_for_its_main_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path)
    (tmp_path / "research" / "__main__.py").write_text(
        TRAIN.format(imports="from .settings import RATE")
    )
    monkeypatch.chdir(tmp_path)
    assert resolve_job("research:train").module == "research.__main__"
    with pytest.raises(BadInput, match="define a function other"):
        resolve_job("research.jobs.small:other")


def test_a_plan_keeps_the_module_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    experiment = plan_experiment("research.jobs.small", nodes=1, spares=0, steps=8)
    recalled: Any = recall(save(experiment, tmp_path / "plan.json"), sharded=False)
    assert (
        recalled.config.job.target
        == experiment.config.job.target
        == f"{tmp_path}/research.jobs.small"
    )
    assert recalled.config.job.module == "research.jobs.small"
    moved = experiment.config.job.moved_to(Path("/elsewhere"))
    assert (moved.path, moved.root) == ("/elsewhere/research/jobs/small.py", "/elsewhere")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("job.py", "job"),
        ("my-job.py", "my-job"),
        ("job.v2.py", "chaoskit_job_job.v2"),  # the plain name would be that of a package
        ("typing.py", "chaoskit_job_typing"),  # the plain name is that of an imported module
    ],
)
def test_a_file_is_imported_under_its_own_name_where_that_finds_it(
    tmp_path: Path, name: str, module: str
) -> None:
    (tmp_path / name).write_text("def train(trainer):\n    pass\n")
    code = "import sys; from chaoskit.job import JobSpec, import_job; print(import_job(JobSpec(sys.argv[1])).__name__)"
    command = [sys.executable, "-c", code, str(tmp_path / name)]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == module
    )


def test_a_helper_that_imports_the_job_gets_the_same_module(tmp_path: Path) -> None:
    """A helper that imports the job gets the job's module: a class of the job must not be two
    classes.
    """
    (tmp_path / "job.py").write_text("class Model: ...\nimport helper\ndef train(trainer): ...\n")
    (tmp_path / "helper.py").write_text("import job\nModel = job.Model\n")
    code = (
        "import sys; from chaoskit.job import JobSpec, import_job; job = import_job(JobSpec(sys.argv[1]));"
        "print(job.Model is job.helper.Model, import_job(JobSpec(sys.argv[1])) is job)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "job.py")]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        == "True True"
    )


def test_a_package_of_chaoskit_that_has_the_name_of_the_job_is_named(tmp_path: Path) -> None:
    (tmp_path / "chaoskit").mkdir()
    (tmp_path / "chaoskit" / "job.py").write_text("def train(trainer): ...\n")
    code = (
        "import sys; from chaoskit.job import JobSpec, import_job;"
        "import_job(JobSpec(sys.argv[1] + '/chaoskit/job.py', module='chaoskit.job', root=sys.argv[1]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "BadInput: job=" in process.stderr
    assert "rename it" in process.stderr


# -- whole runs ------------------------------------------------------------------------------------


def test_a_module_of_a_package_trains_and_is_compared(
    chaos: Chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module trains in ranks, in the unbroken run and in plain PyTorch."""
    write_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan: dict[str, Any] = {"nodes": 2, "spares": 1, "steps": 8, "reference": "required"}
    outcome = chaos.run("research.jobs.small", faults=[Kill(rank=1, at_step=3)], **plan)
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize("how", ["spawn", "forkserver", "fork", "service", "daemon"])
def test_what_a_job_starts_can_import_it_and_leaves_nothing_behind(
    chaos: Chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Workers of a DataLoader and processes in sessions of their own end with the job."""
    mark = str(tmp_path)
    monkeypatch.setenv("TRAINED_BY", mark)
    job = tmp_path / "job.py"
    job.write_text(TRAIN.format(imports="RATE = 1e-3"))
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 1,
        "steps": 8,
        "twin": False,
        "options": {"how": how},
    }
    outcome = chaos.run(str(job), faults=[Kill(rank=1, at_step=6)], **plan)
    logs = "".join(path.read_text() for path in Path(outcome.directory, "log").glob("*.log"))
    assert ("evaluated 16" in logs) == (how in ("spawn", "forkserver", "fork"))
    wait_until(lambda: not left_behind(mark), f"the end of {left_behind(mark)}")


def left_behind(mark: str) -> list[psutil.Process]:
    """Return the living processes of the job: those with its environment, except chaoskit's own
    servers.
    """
    return [
        process
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.pid != os.getpid() and _is_of_job(process, mark)
    ]


def _is_of_job(process: psutil.Process, mark: str) -> bool:
    command = " ".join(process.info["cmdline"] or ())
    try:
        is_marked = process.environ().get("TRAINED_BY") == mark
    except psutil.Error:
        return False
    return is_marked and (
        "3600" in command or "multiprocessing" in command or "pt_data" in process.name()
    )
