"""``python -m chaoskit``: the command line."""

from chaoskit.cli.app import main

if __name__ == "__main__":
    main()
