"""Settings files: YAML (several documents, too), JSON and TOML as plain values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput

_SIZE_MAX_BYTES = 16_000_000
_NEXT_DOCUMENT = re.compile(r"^---(?:\s.*)?$", re.MULTILINE)


def read_text(field: str, path: Path) -> str:
    """The text of a file. Bytes that are no UTF-8 are replaced.

    Raises:
        BadInput: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput(field, str(path), f"name a file that can be read ({error.strerror})") from None


def read_documents(field: str, path: Path) -> list[Any]:
    """The documents in a file: TOML by its suffix, else YAML, of which JSON is a part.

    Raises:
        BadInput: if it cannot be read or parsed, or is far too long.
    """
    text = read_text(field, path)
    if len(text) > _SIZE_MAX_BYTES:
        raise BadInput(field, str(path), f"name a file of settings: this one has over {_SIZE_MAX_BYTES / 1e6:.0f} MB")
    try:
        if path.suffix == ".toml":
            import tomllib

            return [tomllib.loads(text)]
        if path.suffix == ".json":
            return [msgspec.json.decode(text)]
        documents = _NEXT_DOCUMENT.split(text)
        return [msgspec.yaml.decode(document) for document in documents if document.strip()]
    except (ValueError, msgspec.DecodeError) as error:  # what TOML, JSON and YAML raise
        problem = " ".join(str(error).split())
        raise BadInput(field, str(path), f"mend it: {problem}") from None
