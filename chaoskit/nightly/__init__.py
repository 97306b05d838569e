"""Nights of experiments: what is run, what may stop it, and the report on what it has shown."""
