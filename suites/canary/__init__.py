"""Mistakes that a verdict must not pass: of the runtime, of what a fault does, and of what journals tell.

A harness whose verdict can be wrong is worth nothing. Each mistake here names the check that finds it and the verdict
that follows; :mod:`chaoskit.suites.canary.test_journals` and its neighbours hold that none passes.
"""
