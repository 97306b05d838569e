"""Faults of disks, stores, and copies of the training state."""
