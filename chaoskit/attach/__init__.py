"""Attach: faults in a training job that already runs on Kubernetes."""
