"""Requests to the API server of a cluster, and the rights that they need."""
