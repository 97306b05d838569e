"""Comparison of two versions of a project, whose runs take turns on one machine."""
