"""Quickest suite: a check that this installation can break and judge runs."""
