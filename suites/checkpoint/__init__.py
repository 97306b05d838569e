"""Checkpoints that are damaged, lost or poisoned: no training is ever begun from such a state."""
