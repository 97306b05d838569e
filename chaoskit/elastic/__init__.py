"""Worlds that change their size: policies, decisions, learning rates, and the client of a run."""
