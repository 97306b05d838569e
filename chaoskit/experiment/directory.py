"""The directory of a run, which holds all data that its verdict is computed from.

It holds the plan, the journals and logs, and the data that the run is compared with (``twin.json``,
``reference.json``, ``floor.json``). A directory that is copied to another machine, without the job
and without any cache, has the same outcome there.

-> experiment/judge/judge.py and experiment/judge/command_judge.py: the verdict.
experiment/judge/coverage.py: files that are missing or belong to another run.
experiment/plan/planfile.py: the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from chaoskit.errors import BadInput
from chaoskit.experiment.judge.command_judge import judge_command
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.planfile import FILE_NAME, recall
from chaoskit.experiment.reference.cache import write_whole
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.reference import Reference
from chaoskit.experiment.run.command_run import load_command_run
from chaoskit.experiment.run.run import load_run
from chaoskit.experiment.twin.command_twin import CommandTwin
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import read_events
from chaoskit.runlog.outcome import Outcome
from chaoskit.typed import named_path
from chaoskit.vocabulary import Event

_Kept = TypeVar("_Kept")

TWIN, REFERENCE, FLOOR = "twin.json", "reference.json", "floor.json"


def keep(
    directory: Path,
    twin: Twin | CommandTwin | None,
    reference: Reference | None = None,
    floor: Floor | None = None,
) -> None:
    """Write the data that a run is compared with into its directory.

    Each part that is not None is written to its file: ``twin.json``, ``reference.json``,
    ``floor.json``.

    Raises:
        OSError: if a file cannot be written.
    """
    for name, part in ((TWIN, twin), (REFERENCE, reference), (FLOOR, floor)):
        if part is not None:
            write_whole(directory / name, msgspec.json.encode(part))


def judge_directory(directory: str | Path) -> Outcome:
    """Judge the run in ``directory`` again, from its files alone, and return the outcome.

    Raises:
        BadInput: if there is no run, or a file in it is damaged.
    """
    directory = named_path("run directory", directory)
    start_records = read_events(directory / "journal", Event.STARTED)
    experiment = recall(
        directory / FILE_NAME, sharded=bool(start_records and start_records[0]["sharded"])
    )
    if isinstance(experiment, CommandExperiment):
        command_run = load_command_run(directory, experiment)
        return judge_command(
            command_run, _kept(directory / TWIN, CommandTwin), command_run.substrate
        )
    run = load_run(directory, experiment)
    reference, floor = _kept(directory / REFERENCE, Reference), _kept(directory / FLOOR, Floor)
    return judge(run, _kept(directory / TWIN, Twin), run.substrate, reference, floor)


def _kept(path: Path, content_type: type[_Kept]) -> _Kept | None:
    """Return the object that :func:`keep` wrote to ``path``, or None if there is no such file.

    Raises:
        BadInput: if the file is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=content_type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(
            "run directory", str(path), f"copy the directory again, this file is damaged: {error}"
        ) from None
