"""Which runs are of one series: everything that was chosen for them is equal but seed, name and place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.experiment.outcome import Outcome
from chaoskit.experiment.planfile import FILE_NAME

_LENGTH = 16  # hexadecimal digits of the digest: 64 bits
_OF_A_RUN = ("seed", "working_directory")


def plan_of(directory: Path) -> dict[str, Any]:
    """The plan in the directory of a run. Raises BadInput if there is none."""
    path = directory / FILE_NAME
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput("run directory", str(directory), f"name one that holds the plan of its run ({error})") from None
    return found


def series_plan(plan: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The plan that all runs of a series share: with the faults as they were asked for, without a seed, and with the
    job's file as it is named from ``root``.
    """
    shared = {name: value for name, value in plan.items() if name not in ("asked", "name")}
    if "job" in shared and Path(str(shared["job"])).is_relative_to(root):
        shared["job"] = str(Path(str(shared["job"])).relative_to(root))
    shared["faults"] = plan.get("asked") or plan.get("faults", [])
    shared["settings"] = {name: value for name, value in plan.get("settings", {}).items() if name not in _OF_A_RUN}
    return shared


def series_of(outcome: Outcome, plan: Mapping[str, Any], root: Path) -> str:
    """The name of the series of a run.

    It is the digest of the canonical JSON of stack, substrate, job with its options, nodes, spares, reduction, the
    settings that are not the default, and the faults as they were asked for. A version of chaoskit that adds a setting
    so ends no series. Files are named from ``root``, others by their last part: temporary directories have other names
    in each run.
    """
    told = {
        "stack": outcome.stack,
        "substrate": outcome.substrate,
        "job": plan.get("job") or plan.get("command"),
        "watch": plan.get("watch"),
        "steps": plan.get("steps"),
        "options": plan.get("options", {}),
        "nodes": outcome.nodes,
        "spares": outcome.spares,
        "reduction": outcome.reduction,
        "settings": msgspec.to_builtins(outcome.settings),
        "faults": plan.get("asked") or plan.get("faults", []),
    }
    canonical = msgspec.json.encode(_placed(told, root), order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:_LENGTH]


def _placed(value: Any, root: Path) -> Any:
    """The same, with absolute paths as they are named from ``root``."""
    if isinstance(value, Mapping):
        return {str(name): _placed(item, root) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_placed(item, root) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        path = Path(value)
        return str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    return value
