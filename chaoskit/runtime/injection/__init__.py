"""What a worker does to itself when a fault orders it: the in-process faults, and reports read back from the target."""
