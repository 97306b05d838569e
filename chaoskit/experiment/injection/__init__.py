"""Faults during a run: their moments are awaited, they act, and evidence is collected."""
