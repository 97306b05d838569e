"""``python -m chaoskit.substrate.supervisor``: as the runner, or the first process of a container, starts it."""

from chaoskit.substrate.supervisor.server import main

main()
