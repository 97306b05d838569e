"""Tests of checkpoints that are damaged, lost or poisoned: no training begins from such a state."""
