"""Shrinking of failing experiments to the few faults that matter."""
