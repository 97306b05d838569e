"""The command ``chaoskit``: :mod:`app` lists the commands, and each has a module of its name."""
