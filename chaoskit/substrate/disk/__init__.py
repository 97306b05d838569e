"""Disks that fail on purpose: a FUSE file system between a node and one of its directories."""
