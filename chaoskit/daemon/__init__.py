"""Checkpoint daemon of a node: keeps and stores copies of states, and checks the node."""
