"""Handlers of the control plane: one file for all that follows from a message or a moment."""
