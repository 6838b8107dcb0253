"""Folder of MLX's compiled kernels, on CPUs: `mlx` among the temporary files.

MLX compiles C++ there, loads the libraries that it finds there into the process, and checks neither the owner
nor the permissions. So another user of the machine who makes this folder first would run code as us.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from protocol.common.secure_files import is_protected
from protocol.common.temporary_folder import TemporaryFolder

log = logging.getLogger(__name__)


def protect() -> None:
    """Take the folder, or if others can write to it, have MLX use another one. Call it before MLX computes.

    Other temporary files stay where they are. Raises `OSError`.
    """
    named = os.environ.get("TMPDIR", "")
    if named and not Path(named).is_dir():
        os.environ["TMPDIR"] = tempfile.gettempdir()
        log.warning(
            "TMPDIR: there is no folder %s, so temporary files are in %s", named, tempfile.gettempdir()
        )
    folder = Path(tempfile.gettempdir()) / "mlx"  # Python remembers the folder for temporary files
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_protected(folder):
            return
    except OSError as error:
        log.debug("%s: %s", folder, error)
    other = TemporaryFolder("kernels").path
    os.environ["TMPDIR"] = str(other)
    log.warning("%s is writable by others: MLX compiles kernels in %s, for this process only", folder, other)
