"""Experiments on another machine: their harness is a process there, the *driver*, that a supervisor has started.

Only the stream of that supervisor leads there. The plan and the code that it names go through it, journals and logs
come back as they are written, and the verdict is given here.
"""
