"""Mistakes that a verdict must not pass: of the runtime, of the act of a fault, and of journals.

A harness with wrong verdicts is worth nothing. Each mistake here names the check that finds
it and the verdict that follows; :mod:`chaoskit.suites.canary.test_journals` and its neighbours show
that none passes.

-> cli/testing/canary.py runs these tests and prints the table.
"""
