"""Check of the model folder before anything is started, with errors in one line."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.supervisor.models import ServedModel
from protocol.model_folder import problem_with
from protocol.naming import is_folder


class ModelError(Exception):
    """The model cannot be loaded; the message says what to do."""


def look(models: Sequence[ServedModel]) -> None:
    """Raise `ModelError` if the model cannot be loaded, or `OSError` if its folder cannot be read.

    Several models are not checked: one that cannot be loaded must not keep the others from being served.
    """
    if len(models) != 1 or models[0].model is None or not is_folder(models[0].model):
        return
    if why := problem_with(models[0].model):
        raise ModelError(why)
