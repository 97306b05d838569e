"""The tests on which a mutant is tried first. See tests/mutants.py."""

from __future__ import annotations

import mutants


def test_a_mutant_is_tried_on_tests_of_modules_that_use_its_module() -> None:
    """No test imports the module of uneven work; those of the control plane reach it."""
    direct, near = mutants.unit_tests("chaoskit/control/workload.py")
    assert direct == []
    assert "tests/test_plane.py" in near


def test_a_module_that_is_imported_as_a_name_of_its_package_is_found() -> None:
    """``from chaoskit.control import events``."""
    direct, _ = mutants.unit_tests("chaoskit/control/events.py")
    assert "tests/test_plane.py" in direct


def test_users_in_other_folders_of_the_core_are_found() -> None:
    """A module of a package within the runtime is used by modules above it."""
    direct, near = mutants.unit_tests("chaoskit/runtime/injection/numbers.py")
    assert "tests/test_commit.py" in near
    assert "tests/test_acts.py" in direct, "it imports the package"
