"""Tests of changes that turn features off: the places that an entry of promises_off.toml may name,
and refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from features_off import Off

SOURCE = '''"""A shop."""

import contextlib

PRICE = 3
RATES: dict[str, int] = {"a": 1}


def price(count: int) -> int:
    """The price of some pieces."""
    return check(count) * PRICE


def check(count: int) -> int:
    # a comment between the header and the body
    if count < 0:
        raise ValueError(count)
    return count


def short(count): return count


class Base:
    def sold(self):
        return 1


class Shop(Base):
    limit: int = 4

    def sold(
        self,
        step=1,
    ):
        text = """
  not indented
"""
        return super().sold() + step + len(text)

    @property
    def size(self):
        return self.limit

    @classmethod
    def opened(cls):
        return cls()

    @staticmethod
    def name():
        return "shop"

    def pieces(self):
        yield 1
        yield 2

    async def sell(self):
        return 1

    @contextlib.contextmanager
    def held(self):
        yield "held"

    def make(self):
        def inner():
            return 1

        return inner()

    @property
    def both(self):
        return 1

    @both.setter
    def both(self, value):
        pass


if PRICE:

    def guarded():
        return 1
'''
TEXT_LENGTH = len("\n  not indented\n")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a change to the module of the shop, and returns the changed
    globals.
    """
    (tmp_path / "shop.py").write_text(SOURCE)

    def apply(place: str, kind: str = "function", **fields: str) -> dict[str, Any]:
        mutant = Off("it", [], **{kind: f"shop.py:{place}"}, **fields).mutant(tmp_path)
        names: dict[str, Any] = {}
        exec(mutant.apply(SOURCE.encode()).decode(), names)  # noqa: S102
        return names

    return apply


@pytest.mark.parametrize(
    ("place", "body", "call", "value"),
    [
        ("price", "return 0", "price(2)", 0),
        ("price", "return original(count) + 1", "price(2)", 7),
        ("price", "check = lambda count: 1\nreturn original(count)", "price(2)", 3),
        ("check", "return original(abs(count))", "check(-2)", 2),
        ("short", "return original(count) + 1", "short(1)", 2),
        ("guarded", "return 2", "guarded()", 2),
        ("Shop.sold", "return original(self, 5)", "Shop().sold()", 6 + TEXT_LENGTH),
        ("Shop.size", "return original(self) + 1", "Shop().size", 5),
        ("Shop.opened", "return [original(cls)]", "len(Shop.opened())", 1),
        ("Shop.name", "return original() + 's'", "Shop.name()", "shops"),
        ("Shop.pieces", "yield from original(self)\nyield 3", "list(Shop().pieces())", [1, 2, 3]),
        ("Shop.make.inner", "return 2", "Shop().make()", 2),
    ],
)
def test_a_function_has_another_body(
    changed: Callable[..., dict[str, Any]], place: str, body: str, call: str, value: object
) -> None:
    """The body may call the function as it was, and may replace what that calls."""
    assert eval(call, changed(place, body=body)) == value  # noqa: S307


def test_an_asynchronous_function_has_another_body(changed: Callable[..., dict[str, Any]]) -> None:
    """The function stays a coroutine."""
    coroutine = changed("Shop.sell", body="return 1 + await original(self)")["Shop"]().sell()
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    assert stopped.value.value == 2


def test_a_context_manager_has_another_body(changed: Callable[..., dict[str, Any]]) -> None:
    """The decorator stays on the function and is not on the original."""
    with changed("Shop.held", body="yield from [f'{thing}!' for thing in original(self)]")[
        "Shop"
    ]().held() as held:
        assert held == "held!"


def test_the_docstring_stays(changed: Callable[..., dict[str, Any]]) -> None:
    """Commands show it as their help."""
    assert changed("price", body="return 0")["price"].__doc__ == "The price of some pieces."


@pytest.mark.parametrize(
    ("place", "value", "call", "result"),
    [
        ("PRICE", "5", "price(2)", 10),
        ("RATES", "{}", "RATES", {}),
        ("Shop.limit", "9", "Shop().size", 9),
    ],
)
def test_a_constant_has_another_value(
    changed: Callable[..., dict[str, Any]], place: str, value: str, call: str, result: object
) -> None:
    """The default of a field can be changed, too."""
    assert eval(call, changed(place, "constant", value=value)) == result  # noqa: S307


def test_text_is_replaced_inside_its_function_only(changed: Callable[..., dict[str, Any]]) -> None:
    """Another function with the same text is not changed."""
    names = changed("Shop.make.inner", old="return 1", new="return 2")
    assert (names["Shop"]().make(), names["guarded"]()) == (2, 1)


@pytest.mark.parametrize(
    ("place", "fields", "why"),
    [
        ("gift", {"body": "pass"}, "defined 0 times"),
        ("Shop.both", {"body": "pass"}, "defined 2 times"),
        ("Shop", {"body": "pass"}, "is no function"),
        ("price", {}, "neither body nor old"),
        ("price", {"body": "return ("}, "no valid Python"),
        ("price", {"body": "break"}, "no valid Python"),
        ("price", {"body": "return check(count) * PRICE"}, "changes nothing"),
        ("price", {"body": "return gift(count)"}, r"has no \['gift'\]"),
        ("price", {"body": "chek = None\nreturn original(count)"}, r"assigns \['chek'\]"),
        ("price", {"old": "PRISE", "new": "1"}, "stands in shop.py:price 0 times"),
        ("check", {"old": "count", "new": "1"}, "stands in shop.py:check 4 times"),
        ("price", {"old": "PRICE", "new": ")"}, "no valid Python"),
        ("PRICE", {"body": "pass"}, "is no function"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(
    changed: Callable[..., dict[str, Any]], place: str, fields: dict[str, str], why: str
) -> None:
    """An entry must be changed when its name is renamed in the product."""
    with pytest.raises(ValueError, match=why):
        changed(place, **fields)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("GIFT", "1", "defined 0 times"),
        ("price", "1", "is no constant"),
        ("PRICE", "3", "changes nothing"),
    ],
)
def test_a_value_that_cannot_be_given_is_refused(
    changed: Callable[..., dict[str, Any]], place: str, value: str, why: str
) -> None:
    """A function is no constant, and a value that the constant already has turns nothing off."""
    with pytest.raises(ValueError, match=why):
        changed(place, "constant", value=value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The entries of a file that was moved must be changed, too."""
    with pytest.raises(ValueError, match="No such file"):
        Off("it", [], function="shop.py:price", body="pass").mutant(tmp_path)
