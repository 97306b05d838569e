"""Commands that train, that control a running job, and that observe a run."""
