"""What a person at a terminal sees and types: the live table of `status`, the conversation of `chat`."""
