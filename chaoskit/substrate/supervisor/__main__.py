"""``python -m chaoskit.substrate.supervisor``: entry point of a supervisor.

The runner starts it, or it is the first process of a container.
"""

from chaoskit.substrate.supervisor.server import main

main()
