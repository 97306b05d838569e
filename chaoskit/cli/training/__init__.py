"""Commands that train, that speak to a job that trains, and that look at a run."""
