"""The training state of one rank: registration, watching, sharing, pieces and replacement."""
