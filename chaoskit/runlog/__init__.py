"""Readers of a run's records: its history, faults, recoveries and findings."""
