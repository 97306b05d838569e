"""Actions on the pods of a job that already runs, and on the machines below them."""
