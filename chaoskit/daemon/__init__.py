"""The checkpoint daemon of a node: it keeps copies of training states, stores them, and checks the node."""
