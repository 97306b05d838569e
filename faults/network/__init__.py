"""Faults of the network between nodes."""
