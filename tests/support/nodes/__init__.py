"""Nodes, supervisors, coordinators, networks and clusters for tests."""
