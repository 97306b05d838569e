"""Recordings of clusters and CRDs, which lie beside the checkout and not in it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

#: The variable with the folder of these files.
VARIABLE = "CHAOSKIT_TEST_CLUSTER_DATA"
_ROOT = Path(__file__).parents[3]


@functools.cache
def folder() -> Path | None:
    """Return the folder, or None if there is none.

    Without a variable it is ``shared/data`` beside the checkout, or beside a folder above it.
    """
    if path := os.environ.get(VARIABLE):
        return Path(path)
    places = (above / "shared" / "data" for above in _ROOT.parents)
    return next((place for place in places if place.is_dir()), None)


def missing() -> str:
    """Return why there are no such files, or "" if there are."""
    return "" if folder() else f"no {VARIABLE} names a folder with recordings of clusters"


def recording(name: str) -> list[dict[str, Any]]:
    """Return the observations of a recording of a JobSet and its objects, in their order."""
    path = _folder() / "jobset-recordings" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def crd(name: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition, such as ``jobset``."""
    import msgspec

    definition: dict[str, Any] = msgspec.yaml.decode((_folder() / f"{name}-crd.yaml").read_bytes())
    return definition


def _folder() -> Path:
    path = folder()
    assert path is not None, missing()
    return path
