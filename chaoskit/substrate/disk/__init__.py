"""Disk faults, by a FUSE file system between a node and one of its directories."""
