"""Limit of open files, which mlx-lm changes when it is imported: to 2048, with a hard limit of 4096.

Only root may raise a hard limit, so the import fails below 4096. mlx-lm is then imported here, while its
change is kept within the limit of this process.
"""

from __future__ import annotations

import importlib
import resource

_UPSTREAM = "mlx_lm.utils"
_WANTED = 4096


def import_upstream() -> None:
    """Import mlx-lm if the limit is below what it sets; otherwise do nothing. Call it before any other
    import of mlx-lm."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _WANTED:
        return
    set_limit = resource.setrlimit

    def within_limit(kind: int, limits: tuple[int, int]) -> None:
        """Set a limit of mlx-lm's, or as much of it as is allowed."""
        soft, wanted = limits
        set_limit(kind, (min(soft, hard), min(wanted, hard)))

    resource.setrlimit = within_limit
    try:
        importlib.import_module(_UPSTREAM)
    finally:
        resource.setrlimit = set_limit
