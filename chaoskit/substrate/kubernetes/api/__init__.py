"""Access to the API server: requests, the rights that they need, and leases."""
