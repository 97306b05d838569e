"""Nights of experiments: their plan, their runs, conditions that stop them, and their reports."""
