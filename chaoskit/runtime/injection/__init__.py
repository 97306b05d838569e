"""The in-process faults: acts that a worker carries out on itself when a fault orders them."""
