"""Durable answers: they outlive the connection of their client, and the gateway that began them."""
