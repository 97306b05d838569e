"""Files of a command on nodes that do not see those of this host: what is copied, and its paths."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from chaoskit.errors import BadInput
from chaoskit.stacks.command import CommandNode, arguments, path_on_node
from chaoskit.substrate.cluster.node_files import copied_directories
from chaoskit.substrate.core.base import Needs
from chaoskit.substrate.supervisor.sources import Source

PATHS = {"/home/me/work": "/copies/1", "/home/me/work/inner": "/copies/2"}


@pytest.mark.parametrize(
    ("argument", "there"),
    [
        ("/home/me/work", "/copies/1"),
        ("/home/me/work/train.py", "/copies/1/train.py"),
        ("/home/me/work/inner/a/b", "/copies/2/a/b"),
        ("/home/me/work/x/../train.py", "/copies/1/train.py"),
        ("/home/me/work/.venv/bin/python", "/home/me/work/.venv/bin/python"),  # never copied
        ("/home/me/workshop/train.py", "/home/me/workshop/train.py"),
        ("/home/me/work/../other", "/home/me/work/../other"),
        ("train.py", "train.py"),
        ("--config=/home/me/work/x", "--config=/home/me/work/x"),
    ],
)
def test_paths_below_a_copied_directory_name_the_copy(argument: str, there: str) -> None:
    assert path_on_node(argument, PATHS) == there


def test_a_placeholder_is_a_path_of_the_node_already() -> None:
    """The shared directory of the pods may lie below the working directory on this host."""
    values = CommandNode(0, 1, "", "", 0, "/home/me/work/checkpoints", "", 0, "")
    command = [path_on_node(argument, PATHS) for argument in ("{run_dir}/x", "/home/me/work/y")]
    assert arguments(command, values) == ("/home/me/work/checkpoints/x", "/copies/1/y")


def test_folders_of_named_files_are_copied_and_those_of_programs_are_not() -> None:
    work = Path("/home/me/work")
    program, library = Path(sys.executable).parent, Path(sysconfig.get_path("stdlib"))
    needs = Needs((work / "inner", Path("/data/a/../b"), program, library), (work,))
    assert copied_directories(needs) == [work, Path("/data/b")]
    outside = Needs((Path("/data/x/../../home/me/other"),), (work,))
    assert copied_directories(outside) == [work, Path("/home/me/other")]


@pytest.mark.parametrize("needs", [Needs((Path("/"),)), Needs((), (Path("/"),))])
def test_the_root_directory_is_not_copied(needs: Needs) -> None:
    with pytest.raises(BadInput, match="root directory"):
        copied_directories(needs)


def test_the_directory_of_the_runs_is_not_copied_with_the_files(tmp_path: Path) -> None:
    """Each run would make the next copy larger, and another one."""
    (tmp_path / "train.py").write_text("")
    runs = tmp_path / "report" / "runs"
    before = Source(tmp_path, without=runs).digest
    (runs / "001").mkdir(parents=True)
    (runs / "001" / "plan.json").write_text("{}")
    assert Source(tmp_path, without=runs).digest == before
    assert Source(tmp_path).digest != before
