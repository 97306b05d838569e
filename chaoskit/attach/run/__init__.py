"""A run with faults on a job that runs already: its pods are the nodes, and hands act in them."""
