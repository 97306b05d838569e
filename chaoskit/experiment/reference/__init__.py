"""Plain PyTorch, with which a run is compared: its losses, its final state, and how far two right runs differ."""
