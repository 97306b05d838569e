"""The twin of a running job: a second job of the same training, which no fault strikes."""
