"""Commands for machines and clusters."""
