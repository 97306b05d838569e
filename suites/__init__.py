"""Suites that users run with pytest; installed as `chaoskit.suites`."""
