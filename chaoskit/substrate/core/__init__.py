"""The interface of substrates: nodes, actions on them as data, and processes, in terms that every substrate shares."""
