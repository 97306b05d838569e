"""The agent of a node: starts and watches workers, and keeps the connection to the coordinator."""
