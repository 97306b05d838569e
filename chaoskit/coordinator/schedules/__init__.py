"""Schedules of the coordinator: when a run begins, when workers are started, and when a state is stored."""
