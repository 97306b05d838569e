"""Log rules on the logs of a node's ranks: the watcher in the agent, and the process that matches patterns."""
