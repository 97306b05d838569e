"""Machine and sources of a run: facts that decide if numbers of two sessions can be compared.

-> history/session.py puts them into the record of a run. history/compare.py: numbers that only runs
on one machine have in common.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from chaoskit.process.linux import core_count, cpu_model
from chaoskit.runlog.outcome import Outcome

_GIT_S = 10.0


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """The user's sources.

    Attributes:
        root: the root of their repository.
        commit: the commit; "" outside of a repository.
        is_changed: True if tracked files differ from the commit.
    """

    root: Path
    commit: str = ""
    is_changed: bool = False


def sources_at(directory: Path) -> Sources:
    """Return the repository of a directory, or the directory itself if it belongs to none.

    The directory is also returned, without a commit, if git fails or there is no commit yet.
    """
    root, commit = (
        _git(directory, "rev-parse", "--show-toplevel"),
        _git(directory, "rev-parse", "HEAD"),
    )
    if not root or not commit:
        return Sources(root=directory)
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return Sources(root=Path(root), commit=commit, is_changed=bool(changed))


def _git(directory: Path, *arguments: str) -> str:
    """Return the output of a git command; "" if it fails."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


def machine_of(outcome: Outcome) -> str:
    """Return what durations depend on: processor, cores, device and substrate.

    Processor and cores are those that the ranks reported, else those of this machine. The device
    is left out if it is the CPU.
    """
    processor = outcome.environment.get("machine") or f"{cpu_model()}, {core_count():g} cores"
    device = outcome.settings.get("device", "cpu")
    return ", ".join([processor, *([str(device)] if device != "cpu" else []), outcome.substrate])


def covariates_of(outcome: Outcome, sources: Sources) -> dict[str, str]:
    """Return facts that may explain a difference between two sessions: versions, load, sources.

    Load and changed sources are those of now; they are left out without a commit. Facts that are
    not known are left out, too.
    """
    facts = {
        name: str(outcome.environment.get(name, ""))
        for name in ("chaoskit", "torch", "python", "kernel")
    }
    if sources.commit:  # otherwise the run was made elsewhere, or at another time
        facts["load"] = f"{os.getloadavg()[0]:.1f}"
        facts["sources"] = "changed" if sources.is_changed else ""
    return {name: text for name, text in facts.items() if text}
