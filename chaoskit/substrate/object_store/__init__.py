"""Object stores that fail on purpose: an HTTP proxy before a store."""
