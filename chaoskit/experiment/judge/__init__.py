"""The verdict on a run, from the records in its directory."""
