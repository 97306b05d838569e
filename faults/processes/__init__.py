"""Faults of one process: it ends, hangs, is slow, fails, or runs out of memory."""
