"""`python -m deploy` is `roundhouse`."""

from deploy.cli import main

main()
