"""Worlds that change their size: policies, decisions, learning rates that follow the batch, and the client of a run."""
