"""Outcomes on disk: one ``outcome.json`` an experiment, beside its journals."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.runlog.outcome import Outcome
from chaoskit.typed import named_path

FILE_NAME = "outcome.json"


def encode_outcome(outcome: Outcome) -> bytes:
    """``outcome`` as standard JSON. A NaN or infinite number becomes the text ``nan``, ``inf`` or ``-inf``."""
    return msgspec.json.encode(_spelled(msgspec.to_builtins(outcome)))


def decode_outcome(data: bytes) -> Outcome:
    """The inverse of :func:`encode_outcome`. Raises ``msgspec.MsgspecError`` where ``data`` is not an outcome."""
    return msgspec.json.decode(
        data, type=Outcome, strict=False
    )  # not strict: the text "nan" is a number


def write_outcome(outcome: Outcome, directory: Path) -> Path:
    """Write ``directory/outcome.json``; a reader sees the old file or the new one, never a part."""
    path = directory / FILE_NAME
    write_whole(path, encode_outcome(outcome))
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; a reader sees the old one or the new one, never a part. Raises OSError, and then leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_outcomes(directory: str | Path) -> list[Outcome]:
    """Read every outcome at or below ``directory``, in the order in which the runs were started.

    Raises:
        BadInput: if there is none, or one cannot be read.
    """
    directory = named_path("directory", directory)
    paths = sorted(directory.rglob(FILE_NAME))
    if not paths:
        raise BadInput(
            "directory", str(directory), f"name a directory that holds an {FILE_NAME} at any depth"
        )
    return sorted(map(_read, paths), key=lambda outcome: outcome.started)


def _read(path: Path) -> Outcome:
    try:
        return decode_outcome(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        remedy = f"Run the experiment again or delete this file ({error})."
        raise BadInput("outcome", str(path), remedy) from error


def _spelled(value: Any) -> Any:
    """``value`` with non-finite numbers as text: JSON has no word for them and msgspec would write null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return value
