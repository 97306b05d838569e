"""How much of the tests is run: on each commit, a share of the cases of those that train; at night, all of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

_OPTION = "--one-case-in"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION,
        type=int,
        default=1,
        metavar="N",
        help="of the cases of each test that starts trainings, run one in N, always the same ones; default: all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share: int = config.getoption(_OPTION)
    if share < 1:
        raise pytest.UsageError(f"{_OPTION} {share}: use a whole number, 1 or more")
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "chaos" in getattr(item, "fixturenames", ()):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for group in cases.values():
        group.sort(key=_draw)
        left_out.update(group[-(-len(group) // share) :])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def _draw(item: pytest.Item) -> str:
    """An order that has nothing to do with that of the parameters."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()
