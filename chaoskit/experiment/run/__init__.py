"""One run of an experiment, of a job or of a command: started, followed, ended, and read back from its records."""
