"""Copies of a training state in shared memory that outlives its worker."""
