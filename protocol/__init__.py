"""What gateway, workers and supervisor share. Here: what crosses a process boundary, messages first of all.

`settings`: what each process is told at its start. `common`: what each does by itself, in the same way. The
lowest layer: `broker`, `worker` and `deploy` import it, and it imports none of them.
"""
