"""Copies of a training state on other nodes: placement, transfer and verification."""
