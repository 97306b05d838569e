"""Runs of experiments with a job or a command: started, followed, ended, and read from their
records.
"""
