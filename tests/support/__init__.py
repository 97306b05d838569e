"""Helpers that tests of all rooms share. No test lives here."""
