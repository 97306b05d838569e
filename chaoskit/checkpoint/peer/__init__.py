"""Copies of a training state on other nodes: where they are placed, and how they are sent, verified and read back."""
