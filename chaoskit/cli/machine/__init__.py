"""Commands about machines and clusters."""
