"""Faults that need a Kubernetes cluster."""
