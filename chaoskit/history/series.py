"""Identity of a series: runs that differ only in seed, name, place and deadline belong together.

-> history/session.py: the record of a run, with the name of its series.
-> history/compare.py compares runs of one series only.
"""

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

_DIGEST_DIGITS = 16  # hexadecimal digits of a digest: 64 bits
_SECRET = re.compile(r"(?i)(api.?key|access.?key|token|secret|password|credential)")
_HIDDEN = "***"
#: An absolute path, alone or in a word such as --data=/tmp/x. Of URLs, only file:// matches.
_PATH = re.compile(r"(?:(?<=^)|(?<=[=,\s])|(?<=file:/{2}))/[^\s=,;:'\"]+")


def plan_of(directory: Path) -> dict[str, Any]:
    """Return the plan in the directory of a run. Raise BadInput if there is none."""
    path = directory / FILE_NAME
    try:
        plan: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(
            "run directory", str(directory), f"name a directory with the plan of a run ({error})"
        ) from None
    return plan


def series_plan(plan: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Return the plan that all runs of a series share.

    It contains the faults as they were asked for, and neither seed nor name. Paths of the job, the
    command and the working directory that are below ``root`` become relative to it. Values that
    look like secrets are replaced by ``***``.
    """
    shared = {name: setting for name, setting in plan.items() if name not in ("asked", "name")}
    for name in ("job", "command"):
        if name in shared:
            shared[name] = _relative_to_root(shared[name], root)
    settings = {
        name: setting for name, setting in plan.get("settings", {}).items() if name != "seed"
    }
    if "working_directory" in settings:
        settings["working_directory"] = _relative_to_root(settings["working_directory"], root)
    result = shared | {"faults": plan.get("asked") or plan.get("faults", []), "settings": settings}
    return {name: _without_secrets(content, name) for name, content in result.items()}


def _relative_to_root(setting: Any, root: Path) -> Any:
    """Return a path or a list of words; paths in the repository become relative to its root."""
    if isinstance(setting, list):
        return [_relative_to_root(part, root) for part in setting]
    path = Path(str(setting))
    return (
        str(path.relative_to(root)) if path.is_absolute() and path.is_relative_to(root) else setting
    )


def _without_secrets(setting: Any, name: str = "") -> Any:
    """Return a value of a plan in which secrets are replaced by ``***``.

    A text is a secret if its name, or the option before it on a command line, looks like one.
    """
    if isinstance(setting, Mapping):
        return {key: _without_secrets(content, str(key)) for key, content in setting.items()}
    if isinstance(setting, list):
        hidden, words = False, []
        for word in setting:
            words.append(_HIDDEN if hidden and isinstance(word, str) else _without_secrets(word))
            hidden = (
                isinstance(word, str)
                and word.startswith("-")
                and "=" not in word
                and bool(_SECRET.search(word))
            )
        return words
    if not isinstance(setting, str):
        return setting
    if _SECRET.search(name):
        return _HIDDEN
    option, mark, _ = setting.partition("=")
    return f"{option}={_HIDDEN}" if mark and _SECRET.search(option) else setting


def series_of(outcome: Outcome, plan: Mapping[str, Any], root: Path) -> str:
    """Return the name of the series of a run.

    It is a digest of canonical JSON: stack, substrate, job or command with its options, steps,
    nodes, spares, reduction, settings and faults. Settings and fields of faults count only if they
    are not the default, so that a new setting or field of chaoskit ends no series. The faults are
    those that were asked for.

    Files in the repository are named relative to its root. A job that lies elsewhere is named by
    its contents. Temporary paths count as equal, because they have other names in each run. Other
    paths are named by their last part.
    """
    shared = series_plan(plan, root)
    identity = {
        "stack": outcome.stack,
        "substrate": outcome.substrate,
        "job": _job_identity(str(shared["job"])) if shared.get("job") else shared.get("command"),
        "watch": shared.get("watch"),
        "steps": shared.get("steps"),
        "reference": shared.get("reference"),
        "options": shared.get("options", {}),
        "nodes": outcome.nodes,
        "spares": outcome.spares,
        "reduction": outcome.reduction,
        "settings": _without_secrets(msgspec.to_builtins(outcome.settings)),
        "faults": [_changed_fields(fault) for fault in shared["faults"]],
    }
    return _digest(msgspec.json.encode(_normalize(identity, root), order="sorted"))


def _digest(data: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 digest."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS]


def _job_identity(job: str) -> str:
    """Return the identity of a job: its name or path in the repository.

    A file outside of the repository is identified by its name and digest, as tests may write the
    same job into a temporary directory each.
    """
    path, mark, function = job.partition(":")
    with suppress(OSError):
        if path.startswith("/"):
            return f"{Path(path).name}@{_digest(Path(path).read_bytes())}{mark}{function}"
    return job


def _changed_fields(fault: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a fault that differ from the default of its kind, without ``judged``.

    All fields are returned if the kind is not installed here.
    """
    changed = {name: content for name, content in fault.items() if name != "judged"}
    with suppress(BadInput):  # the kind is not installed here
        defaults = {
            parameter.name: msgspec.to_builtins(parameter.default)
            for parameter in fields(find_kind(str(fault.get("kind", ""))))
            if isinstance(parameter.default, bool | int | float | str | None)
        }
        changed = {
            name: content
            for name, content in changed.items()
            if name not in defaults or content != defaults[name]
        }
    return changed


def _normalize(setting: Any, root: Path) -> Any:
    """Return a value without differences that do not matter.

    Paths that differ between runs are normalized, and integral floats become integers.
    """
    if isinstance(setting, Mapping):
        return {str(name): _normalize(content, root) for name, content in setting.items()}
    if isinstance(setting, list | tuple):
        return [_normalize(content, root) for content in setting]
    if isinstance(setting, float) and setting.is_integer():
        return int(setting)
    return (
        _PATH.sub(lambda path: _normalize_path(Path(path[0]), root), setting)
        if isinstance(setting, str)
        else setting
    )


def _normalize_path(path: Path, root: Path) -> str:
    """Return a path relative to the root, "TMP" for a temporary path, or the last part of another
    path."""
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    return "TMP" if path.is_relative_to(tempfile.gettempdir()) else path.name
