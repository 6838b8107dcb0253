"""Vision models as the worker loads them, and requests with images as it is sent them."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from protocol.conversation import pack
from protocol.messages import Generate
from protocol.parts import Media, Sampling
from tests.worker.eyes import Question, folder_of
from worker.contract import Model, Prepared, Preparer
from worker.models.load import ModelLoader

CONTEXT_TOKENS = 4096


@cache
def loaded(name: str) -> Model:
    model = ModelLoader(str(folder_of(name))).load(lambda done, total: None)
    assert isinstance(model, Model)
    return model


@cache
def preparer(name: str) -> Preparer:
    return loaded(name).open_preparer(CONTEXT_TOKENS)


def request(id: str, question: Question, **fields: Any) -> Generate:
    """What the gateway sends for a question."""
    media = [
        Media(frame=index, mime="image/png", sha256=hashlib.sha256(data).hexdigest(), param=f"image {index}")
        for index, data in enumerate(question.images)
    ]
    given = {"messages": pack(list(question.messages)), "media": media, "sampling": Sampling(seed=0)}
    return Generate(incarnation="gateway-1", id=id, **given | fields)


def prepared(name: str, id: str, question: Question, **fields: Any) -> Prepared:
    return preparer(name).prepare(request(id, question, **fields), question.images)
