"""Attached jobs for tests: their pods as a watch sees them, and runs that break them."""
