"""A run on a substrate: its nodes, its network, and its coordinator or command."""
