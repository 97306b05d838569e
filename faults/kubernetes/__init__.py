"""What only a Kubernetes cluster has, and can break."""
