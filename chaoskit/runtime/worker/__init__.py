"""The process of a worker: how it is forked, which code it runs, and its log."""
