"""Logs of the containers of a foreign job, followed over the Kubernetes API."""
