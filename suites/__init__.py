"""Test suites that users run with pytest; installed as ``chaoskit.suites``.

-> cli/testing/test.py runs them by name; pytest_plugin.py has the fixture ``chaos``.
"""
