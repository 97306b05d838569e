"""Faults, stalls and resizes of a history, drawn from its seed."""
