"""The disk tier: snapshots in a directory, each of them complete or invisible."""
