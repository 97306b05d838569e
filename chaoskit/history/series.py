"""The series of a run: everything that was chosen for its runs is equal but seed, name, place and deadline."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.planfile import FILE_NAME
from chaoskit.faults.kinds import find_kind
from chaoskit.runlog.outcome import Outcome

_LENGTH = 16  # hexadecimal digits of a digest: 64 bits
_SECRET = re.compile(r"(?i)(api.?key|access.?key|token|secret|password|credential)")
_HIDDEN = "***"
#: An absolute path, alone or in a word such as --data=/tmp/x; not what follows the scheme of another URL.
_PATH = re.compile(r"(?:(?<=^)|(?<=[=,\s])|(?<=file:/{2}))/[^\s=,;:'\"]+")


def plan_of(directory: Path) -> dict[str, Any]:
    """The plan in the directory of a run. Raises BadInput if there is none."""
    path = directory / FILE_NAME
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(
            "run directory", str(directory), f"name one that holds the plan of its run ({error})"
        ) from None
    return found


def series_plan(plan: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The plan that all runs of a series share: with the faults as they were asked for, and without a seed. Files of
    the repository are named from ``root``, and what looks like a secret is left out.
    """
    shared = {name: value for name, value in plan.items() if name not in ("asked", "name")}
    for name in ("job", "command"):
        if name in shared:
            shared[name] = _below(shared[name], root)
    settings = {name: value for name, value in plan.get("settings", {}).items() if name != "seed"}
    if "working_directory" in settings:
        settings["working_directory"] = _below(settings["working_directory"], root)
    found = shared | {"faults": plan.get("asked") or plan.get("faults", []), "settings": settings}
    return {name: _without_secrets(value, name) for name, value in found.items()}


def _below(value: Any, root: Path) -> Any:
    """Paths in the repository as they are named from its root."""
    if isinstance(value, list):
        return [_below(item, root) for item in value]
    path = Path(str(value))
    return (
        str(path.relative_to(root)) if path.is_absolute() and path.is_relative_to(root) else value
    )


def _without_secrets(value: Any, name: str = "") -> Any:
    """The same without values whose name says that they are secret, in options and on command lines."""
    if isinstance(value, Mapping):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        hidden, found = False, []
        for item in value:
            found.append(_HIDDEN if hidden and isinstance(item, str) else _without_secrets(item))
            hidden = (
                isinstance(item, str)
                and item.startswith("-")
                and "=" not in item
                and bool(_SECRET.search(item))
            )
        return found
    if not isinstance(value, str):
        return value
    if _SECRET.search(name):
        return _HIDDEN
    option, mark, _ = value.partition("=")
    return f"{option}={_HIDDEN}" if mark and _SECRET.search(option) else value


def series_of(outcome: Outcome, plan: Mapping[str, Any], root: Path) -> str:
    """The name of the series of a run.

    It is the digest of the canonical JSON of stack, substrate, job with its options, nodes, spares, reduction, the
    settings that are not the default, and the faults as they were asked for, with the fields that are not the default.
    A version of chaoskit that adds a setting or a field so ends no series. Files in the repository are named from its
    root, a job that lies elsewhere by its contents, and other paths by their last part: temporary directories have
    other names in each run.
    """
    shared = series_plan(plan, root)
    told = {
        "stack": outcome.stack,
        "substrate": outcome.substrate,
        "job": _job(str(shared["job"])) if shared.get("job") else shared.get("command"),
        "watch": shared.get("watch"),
        "steps": shared.get("steps"),
        "reference": shared.get("reference"),
        "options": shared.get("options", {}),
        "nodes": outcome.nodes,
        "spares": outcome.spares,
        "reduction": outcome.reduction,
        "settings": _without_secrets(msgspec.to_builtins(outcome.settings)),
        "faults": [_chosen(fault) for fault in shared["faults"]],
    }
    return _digest(msgspec.json.encode(_placed(told, root), order="sorted"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LENGTH]


def _job(job: str) -> str:
    """A job outside of the repository by what is in its file: tests may write one into a temporary directory each."""
    path, mark, function = job.partition(":")
    with suppress(OSError):
        if path.startswith("/"):
            return f"{Path(path).name}@{_digest(Path(path).read_bytes())}{mark}{function}"
    return job


def _chosen(fault: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a fault that are not its kind's default."""
    found = {name: value for name, value in fault.items() if name != "judged"}
    with suppress(BadInput):  # a kind that is not installed here
        defaults = {
            one.name: msgspec.to_builtins(one.default)
            for one in fields(find_kind(str(fault.get("kind", ""))))
            if isinstance(one.default, bool | int | float | str | None)
        }
        found = {
            name: value
            for name, value in found.items()
            if name not in defaults or value != defaults[name]
        }
    return found


def _placed(value: Any, root: Path) -> Any:
    """The same with paths as they are in every run, and numbers in one form."""
    if isinstance(value, Mapping):
        return {str(name): _placed(item, root) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_placed(item, root) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return (
        _PATH.sub(lambda path: _place(Path(path[0]), root), value)
        if isinstance(value, str)
        else value
    )


def _place(path: Path, root: Path) -> str:
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    return "TMP" if path.is_relative_to(tempfile.gettempdir()) else path.name
