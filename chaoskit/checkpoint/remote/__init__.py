"""Remote tier: snapshots on object stores, and on any file system that fsspec supports."""
