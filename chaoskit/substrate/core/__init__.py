"""The interface of substrates: nodes, their processes, and actions on them as data."""
