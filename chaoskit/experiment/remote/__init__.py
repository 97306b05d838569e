"""Experiments on another machine, executed there by a process called the *driver*, which a
supervisor has started.

The stream of that supervisor is the only connection. The plan and the code that it names are sent
over it. Journals and logs come back as they are written. The verdict is computed here.
"""
