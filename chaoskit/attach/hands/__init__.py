"""Hands: programs in ephemeral containers that break the pods of jobs that already run."""
