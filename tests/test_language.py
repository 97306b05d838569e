"""A ratchet on language: words for people, docstrings in the middle of a thought, and vague names only get fewer."""

from __future__ import annotations

from language import CEILINGS, Meter, ceilings, class_names, deepest_chain, measure, meters

#: Class names that are defined more than once in the library. The number may only shrink.
DUPLICATES_MAX = 0
#: Classes of the library that are built upon each other. The number may only shrink.
CHAIN_MAX = 3


def test_no_file_is_above_its_ceiling() -> None:
    limits, none = ceilings(), Meter(0, 0, 0)
    above = {
        name: f"{meter}, ceiling {limits.get(name, none)}"
        for name, meter in meters().items()
        if any(count > limit for count, limit in zip(meter, limits.get(name, none), strict=True))
    }
    assert not above, "reword these files; tests/tools/language.py lists the words"


def test_ceilings_are_as_low_as_they_can_be() -> None:
    counts, none = meters(), Meter(0, 0, 0)
    loose = [name for name, limit in ceilings().items() if limit != counts.get(name, none)]
    assert not loose, f"lower {CEILINGS.name}: python tests/tools/language.py --write"


def test_the_meter_sees_each_kind() -> None:
    source = '"""Nobody knows."""\n\ndef f():\n    """Whether it is so."""\n    told = 1  # who asks?\n    return told\n'
    assert measure(source) == Meter(people=2, middle=1, vague=1)
    assert measure('"""Return the whole of it."""\ntotal = 1\n') == Meter(0, 0, 0)


def test_class_names_are_unique() -> None:
    duplicates = class_names()
    assert len(duplicates) <= DUPLICATES_MAX, duplicates


def test_classes_are_not_built_upon_each_other() -> None:
    chain = deepest_chain()
    assert len(chain) <= CHAIN_MAX, chain
