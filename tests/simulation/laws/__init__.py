"""Laws that must hold in simulated histories."""
