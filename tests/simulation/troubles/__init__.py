"""What goes wrong in a history, drawn from its seed."""
