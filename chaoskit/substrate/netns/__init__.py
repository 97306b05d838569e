"""Substrate ``netns``: every node has a network of its own, in a namespace of this machine."""
