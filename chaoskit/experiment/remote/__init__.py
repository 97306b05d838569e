"""Experiments on another machine: a process there, the *driver*, executes them. A supervisor has started it.

Only the stream of that supervisor leads there. The plan and the code that it names go through it, journals and logs
come back as they are written, and the verdict is given here.
"""
