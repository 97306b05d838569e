"""Substrate ``docker``: every node and the coordinator are containers on this machine."""
