"""The machine and the sources of a run: what a reader must know before numbers of two sessions are compared."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from chaoskit.process.linux import core_count, cpu_model
from chaoskit.runlog.outcome import Outcome

_GIT_S = 10.0


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """The user's sources: the root of their repository, its commit, and whether files differ from it."""

    root: Path
    commit: str = ""
    is_changed: bool = False


def sources_at(directory: Path) -> Sources:
    """The repository that a directory belongs to; the directory itself where it belongs to none."""
    root, commit = (
        _git(directory, "rev-parse", "--show-toplevel"),
        _git(directory, "rev-parse", "HEAD"),
    )
    if not root or not commit:
        return Sources(root=directory)
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return Sources(root=Path(root), commit=commit, is_changed=bool(changed))


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine_of(outcome: Outcome) -> str:
    """What its seconds depend on: the processor, the cores and the substrate, as the ranks themselves have told."""
    told = outcome.environment.get("machine") or f"{cpu_model()}, {core_count():g} cores"
    device = outcome.settings.get("device", "cpu")
    return ", ".join([told, *([str(device)] if device != "cpu" else []), outcome.substrate])


def covariates_of(outcome: Outcome, sources: Sources) -> dict[str, str]:
    """What may explain a difference between two sessions."""
    told = {
        name: str(outcome.environment.get(name, ""))
        for name in ("chaoskit", "torch", "python", "kernel")
    }
    if sources.commit:  # else it was made elsewhere, or at another time
        told["load"] = f"{os.getloadavg()[0]:.1f}"
        told["sources"] = "changed" if sources.is_changed else ""
    return {name: value for name, value in told.items() if value}
