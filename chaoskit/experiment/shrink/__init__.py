"""Shrinking of a failing experiment to the few faults that matter."""
