"""Compare two versions of a project: their runs take turns on one machine, until it is known which is slower."""
