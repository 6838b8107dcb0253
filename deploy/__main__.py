"""`python -m deploy` is `roundhouse`."""

from deploy.command.cli import main

main()
