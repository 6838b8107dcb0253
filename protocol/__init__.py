"""What gateway and workers share: wire protocol, error table, settings, logging and process start-up.

The lowest layer: `broker`, `worker` and `deploy` import it, and it imports none of them.
"""
