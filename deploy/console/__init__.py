"""Terminal interface: the live table of `status` and the conversation of `chat`."""
