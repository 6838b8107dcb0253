"""The `roundhouse` command: one module per subcommand or group of subcommands, assembled by `cli`."""
