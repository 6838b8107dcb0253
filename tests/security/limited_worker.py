"""A worker whose user may not raise the hard limit of open files, which root may."""

from __future__ import annotations

import os
import resource
import runpy

LIMIT = 1024

_set_limit = resource.setrlimit


def _as_a_user(kind: int, limits: tuple[int, int]) -> None:
    if limits[1] > resource.getrlimit(kind)[1]:
        raise ValueError("not allowed to raise maximum limit")
    _set_limit(kind, limits)


if __name__ == "__main__":
    os.environ["ROUNDHOUSE_OPENBLAS"] = "off"  # which would start the process anew, without this limit
    _set_limit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    resource.setrlimit = _as_a_user
    runpy.run_module("worker", run_name="__main__", alter_sys=True)
