"""A command is compared with an unbroken run that had the same variables and files, and with no
other run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos, LogPatterns, Outcome, Verdict
from chaoskit.experiment.plan.command_inputs import ENTRIES_MAX, InputFiles, TooManyFiles, differing
from chaoskit.experiment.plan.command_plan import CommandExperiment, plan_command

WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")
TRAIN = """
import os, sys
from pathlib import Path
START = os.environ.get("START", "1")
for path in sys.argv[1:]:
    START = Path(path.removeprefix("--config=")).read_text()
try:
    from helper import START
except ImportError:
    pass
with Path({metrics!r}).open("a") as file:
    file.write("a run\\n")
for step in range(3):
    print("step", step, "loss", int(START) + step, flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a working directory with a script that writes into it."""
    directory = tmp_path / "place"
    directory.mkdir()
    (directory / "train.py").write_text(train(directory))
    return directory


def train(place: Path) -> str:
    """Return a script that adds a line to a file of its working directory.

    It names the file by its path here: nodes may have a copy of the directory.
    """
    return TRAIN.format(metrics=str(place / "metrics.txt"))


def run(chaos: Chaos, place: Path, *arguments: str) -> Outcome:
    settings: dict[str, Any] = {"watch": WATCH, "working_directory": str(place)}
    outcome = chaos.run(command=[sys.executable, *(arguments or ("train.py",))], **settings)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    return outcome


def runs(place: Path) -> int:
    """Return the number of runs of the script, unbroken or not."""
    return len((place / "metrics.txt").read_text().splitlines())


def test_a_twin_is_run_once_although_the_command_writes_files(chaos: Chaos, place: Path) -> None:
    run(chaos, place)
    (place / "metrics.txt").write_text("")  # clearing the file changes no input
    run(chaos, place)
    run(chaos, place)
    assert runs(place) == 2


def test_a_file_that_another_command_writes_is_an_input(chaos: Chaos, place: Path) -> None:
    """A configuration that one command writes is an input of the command that reads it."""
    (place / "prepare.py").write_text(
        f"from pathlib import Path; Path('config.txt').write_text('1')\n{train(place)}"
    )
    run(chaos, place, "prepare.py")
    for start in ("1", "2"):
        (place / "config.txt").write_text(start)
        assert run(chaos, place, "train.py", "config.txt").losses[0] == int(start)


@pytest.mark.promise(
    "The twin is run again where a variable or a file has changed on which the command may depend"
)
@pytest.mark.not_in_pods("variables of pytest are not passed to pods")
def test_a_variable_belongs_to_a_twin(
    chaos: Chaos, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, start in enumerate(["1", "2", "1"]):
        monkeypatch.setenv("START", start)
        outcome = run(chaos, place)
        assert outcome.losses[0] == int(start)
        assert runs(place) == (2, 4, 5)[number], "the third run has the twin of the first"


@pytest.mark.parametrize("arguments", [["train.py"], ["-m", "train"], ["-c", "import train"]])
def test_a_file_that_is_imported_belongs_to_a_twin(
    chaos: Chaos, place: Path, arguments: list[str]
) -> None:
    run(chaos, place, *arguments)
    for start in (12, 123):
        (place / "helper.py").write_text(f"START = {start}\n")
        assert run(chaos, place, *arguments).losses[0] == start
    assert runs(place) == 6


@pytest.mark.parametrize("form", ["{}", "--config={}"])
def test_a_file_that_an_argument_names_belongs_to_a_twin(
    chaos: Chaos, place: Path, tmp_path: Path, form: str
) -> None:
    config = tmp_path / "config.txt"
    for start in ("1", "2"):
        config.write_text(start)
        assert run(chaos, place, "train.py", form.format(config)).losses[0] == int(start)


# -- files that are inputs -------------------------------------------------------------------------


def planned(place: Path, *arguments: str) -> CommandExperiment:
    return plan_command([sys.executable, *arguments], watch=WATCH, working_directory=str(place))


@pytest.mark.parametrize(
    ("path", "arguments", "variables"),
    [
        ("place/package/deep/config.yaml", [], {}),
        ("place/.env", [], {}),
        ("beside/helper.py", ["../beside/train.py"], {}),
        ("beside/data/part.bin", ["train.py", "--data", "../beside/data"], {}),
        ("beside/run.sh", ["-c", "sh ../beside/run.sh; exit"], {}),
        ("beside/library/module.py", [], {"PYTHONPATH": "beside/library"}),
        ("beside/config.json", [], {"CONFIG": "beside/config.json"}),
    ],
)
def test_files_that_may_be_read_are_looked_at(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    arguments: list[str],
    variables: dict[str, str],
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "beside").mkdir(exist_ok=True)
    (tmp_path / "beside" / "train.py").touch()
    file.write_text("1")
    for name, location in variables.items():
        monkeypatch.setenv(name, str(tmp_path / location))
    inputs, experiment = InputFiles(tmp_path / "runs"), planned(place, *arguments)
    before = inputs.look(experiment)
    file.write_text("2")
    os.utime(file, ns=(0, 0))
    assert differing(before, inputs.look(experiment)) == {str(file)}


@pytest.mark.parametrize(
    "path",
    ["__pycache__/train.pyc", ".git/index", ".venv/lib/a.py", "env/lib/a.py", "runs/plan.json"],
)
def test_files_that_say_nothing_are_not_looked_at(place: Path, path: str) -> None:
    (place / path).parent.mkdir(parents=True)
    (place / "env").mkdir(exist_ok=True)
    (place / "env" / "pyvenv.cfg").touch()
    inputs, experiment = InputFiles(place / "runs"), planned(place, "train.py")
    before = inputs.look(experiment)
    (place / path).touch()
    assert not differing(before, inputs.look(experiment))


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open the log of the kernel")
def test_a_file_of_the_kernel_is_not_read(place: Path) -> None:
    """A read of ``/proc/kmsg`` waits for the next message."""
    assert "/proc/kmsg" in InputFiles(place / "runs").look(planned(place, "/proc/kmsg"))


def test_files_that_are_too_many_leave_no_twin_for_others(
    chaos: Chaos, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(ENTRIES_MAX):
        os.close(os.open(place / f"{number}.txt", os.O_CREAT))
    with pytest.raises(TooManyFiles):
        InputFiles(place).look(planned(place, "train.py"))
    run(chaos, place)
    run(chaos, place)
    assert runs(place) == 4
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if "20,000 files" in line)
    assert str(place) in line
    assert "name a smaller working_directory" in line
