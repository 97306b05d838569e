"""Outcomes on disk: an ``outcome.json`` for each experiment, beside its journals.

-> runlog/outcome.py: the fields of an outcome. history/store.py: records of runs over sessions.
-> report/summary.py shows outcomes.
"""

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
    """Return ``outcome`` as standard JSON.

    Non-finite numbers become the text ``nan``, ``inf`` or ``-inf``.
    """
    return msgspec.json.encode(_with_text_numbers(msgspec.to_builtins(outcome)))


def decode_outcome(data: bytes) -> Outcome:
    """Return the outcome that :func:`encode_outcome` has encoded.

    Raise ``msgspec.MsgspecError`` or UnicodeDecodeError if it is no outcome.
    """
    return msgspec.json.decode(
        data, type=Outcome, strict=False
    )  # not strict: the text "nan" is a number


def write_outcome(outcome: Outcome, directory: Path) -> Path:
    """Write ``directory/outcome.json`` atomically, and return its path.

    Raises:
        OSError: if it cannot be written.
    """
    path = directory / FILE_NAME
    write_whole(path, encode_outcome(outcome))
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the new one.

    Its directory is created if necessary, and the data is flushed to the disk.

    Raises:
        OSError: if the file cannot be written. No temporary file is left then.
    """
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
    """Return every outcome at or below ``directory``, sorted by the start of the runs.

    Raises:
        BadInput: if there is no outcome, or any of them cannot be read.
    """
    directory = named_path("directory", directory)
    paths = sorted(directory.rglob(FILE_NAME))
    if not paths:
        raise BadInput(
            "directory", str(directory), f"name a directory that holds an {FILE_NAME} at any depth"
        )
    return sorted(map(_read, paths), key=lambda outcome: outcome.started)


def _read(path: Path) -> Outcome:
    """Return the outcome in a file. Raise BadInput if it cannot be read."""
    try:
        return decode_outcome(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        remedy = f"run the experiment again, or delete this file ({error})"
        raise BadInput("outcome", str(path), remedy) from error


def _with_text_numbers(json_part: Any) -> Any:
    """Return JSON values with non-finite numbers as text; msgspec would write null for them."""
    if isinstance(json_part, float):
        return json_part if math.isfinite(json_part) else str(json_part)
    if isinstance(json_part, dict):
        return {key: _with_text_numbers(content) for key, content in json_part.items()}
    if isinstance(json_part, list):
        return [_with_text_numbers(element) for element in json_part]
    return json_part
