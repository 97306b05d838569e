"""Faults of numbers: NaN, flipped bits, and bad or late batches."""
