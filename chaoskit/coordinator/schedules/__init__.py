"""Schedules of the coordinator: beginning of the run, starts of workers, and stored states."""
