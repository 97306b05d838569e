"""Substrate ``netns``: every node has its own network, in a namespace of this machine."""
