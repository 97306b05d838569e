"""Where nodes come from, and what can be done to them."""
