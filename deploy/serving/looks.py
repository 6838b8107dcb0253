"""A look at the model before anything is started: what is wrong is said at once, in a line, and by us."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.supervisor.models import ServedModel
from protocol.modelfolder import wrong_with
from protocol.naming import is_folder


class ModelError(Exception):
    """It cannot be loaded; says what to do."""


def look(models: Sequence[ServedModel]) -> None:
    """Raises `ModelError`, or `OSError` for a folder that may not be read.

    Of several models each is its own matter: one that cannot be loaded keeps no other from being served.
    """
    if len(models) != 1 or models[0].model is None or not is_folder(models[0].model):
        return
    if why := wrong_with(models[0].model):
        raise ModelError(why)
