"""Entry point of `python -m deploy`, which is the `roundhouse` command."""

from deploy.command.cli import main

main()
