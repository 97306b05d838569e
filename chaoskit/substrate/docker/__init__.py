"""Substrate ``docker``: every node is a container, with a network of its own."""
