"""The process of a worker: how it is forked, what its code depends on, and its log."""
