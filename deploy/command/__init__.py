"""The roundhouse command: one module a subcommand, or a topic of several; `cli` puts them together."""
