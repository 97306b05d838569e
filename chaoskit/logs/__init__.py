"""Log rules on the logs of a node's ranks: the watcher, and the process that matches patterns."""
