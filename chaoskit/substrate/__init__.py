"""Where nodes come from, and the levers that faults pull on them."""
