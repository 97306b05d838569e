"""How much of the tests is run: on each commit, a share of those that train or cost as much; at night, all of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import pytest

_OPTION = "--one-in"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION,
        type=int,
        default=1,
        metavar="N",
        help="of the tests of each file that start trainings or are marked costly, run one in N, always the same ones; "
        "default: all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share: int = config.getoption(_OPTION)
    if share < 1:
        raise pytest.UsageError(f"{_OPTION} {share}: use a whole number, 1 or more")
    training: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        costly = "chaos" in getattr(item, "fixturenames", ()) or item.get_closest_marker("costly") is not None
        if costly and item.get_closest_marker("each_commit") is None:
            training[item.path].append(item)
    left_out: set[pytest.Item] = set()
    for group in training.values():
        group.sort(key=_draw)
        left_out.update(group[-(-len(group) // share) :])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def _draw(item: pytest.Item) -> str:
    """An order that has nothing to do with where a test stands, and what its parameters are."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()
