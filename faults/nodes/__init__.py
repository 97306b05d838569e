"""Faults of whole nodes and of the coordinator, limits of nodes, and worlds that change their size."""
