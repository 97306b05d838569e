"""The agent of a node: it starts and watches workers, and keeps the connection to the coordinator."""
