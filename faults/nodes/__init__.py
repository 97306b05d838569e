"""Faults of whole nodes and of the coordinator, limits of nodes, and changes of the world."""
