"""Limits of nodes by control groups, and the capabilities of this machine."""
