"""Imported by a spare in a test; prints the process's priority."""

from __future__ import annotations

import os

print("imported at", os.getpriority(os.PRIO_PROCESS, 0), flush=True)
