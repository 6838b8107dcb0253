"""The worker's Ready message: the context is limited to what fits into its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import Code, RequestError
from protocol.settings.worker import WorkerSettings
from protocol.types import Capabilities
from tests.factories import request
from tests.models.fixtures import model_folder
from worker.core.memory_reservations import BLOCK_TOKENS
from worker.gateway.model_thread import policy_of, ready_of, store_limits
from worker.interfaces import Model
from worker.load.load import ModelLoader


@pytest.fixture(scope="module")
def dense() -> Model:
    return ModelLoader(str(model_folder("dense"))).load(lambda done, total: None)


def context_length(model: Model, cache_limit_bytes: int | None) -> int:
    policy = policy_of(WorkerSettings(cache_limit_bytes=cache_limit_bytes), model)
    return ready_of("w", model.info, policy).context_length


def test_where_memory_holds_all_of_it_the_context_is_the_models(dense: Model) -> None:
    enough = dense.engine.row_bytes(dense.info.context_length + BLOCK_TOKENS)
    assert context_length(dense, None) == context_length(dense, enough) == dense.info.context_length


def test_where_memory_holds_less_the_context_is_what_it_holds(dense: Model) -> None:
    found = context_length(dense, dense.engine.row_bytes(496))
    assert found == 447  # a row always has room to grow
    assert context_length(dense, 1) == 0


def test_prompts_are_measured_by_the_context_that_was_told(dense: Model) -> None:
    def prepare(words: int, context_length: int) -> tuple[int, int]:
        asked = request(messages=[{"role": "user", "content": "one " * words}])
        engine_request = dense.open_preparer(context_length).prepare(asked, ())
        return len(engine_request.tokens), engine_request.max_tokens

    tokens, room = prepare(100, 511)
    assert tokens + room == 511
    with pytest.raises(RequestError) as caught:
        prepare(100, tokens)
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert f"maximum context length is {tokens} tokens in the memory of this server" in caught.value.message
    assert f"resulted in {tokens} tokens" in caught.value.message
    with pytest.raises(RequestError, match=r"is 4096 tokens\. However"):
        prepare(10_000, dense.info.context_length)


@pytest.mark.parametrize(
    ("limit", "image_cache", "images", "rows"),
    [(800, None, 100, 700), (800, 30, 30, 770), (800, 10**6, 400, 400), (None, None, 2**28, None)],
)
def test_encoded_images_have_a_part_of_the_memory_for_caches(
    dense: Model, limit: int | None, image_cache: int | None, images: int, rows: int | None
) -> None:
    facts = replace(dense.info, capabilities=Capabilities(images=True), cache_bytes_max=limit)
    policy = policy_of(WorkerSettings(image_cache=image_cache), replace(dense, info=facts))
    assert (policy.image_bytes_max, policy.bytes_max) == (images, rows)


def test_a_model_that_takes_no_images_keeps_all_memory_for_caches(dense: Model) -> None:
    policy = policy_of(WorkerSettings(cache_limit_bytes=800, image_cache=100), dense)
    assert (policy.image_bytes_max, policy.bytes_max) == (0, 800)


@pytest.mark.parametrize(
    ("given", "caches", "limit"), [(None, 900, 900), (2000, 900, 900), (300, 900, 300), (None, None, None)]
)
def test_prefixes_in_memory_have_at_most_the_memory_of_all_caches(
    given: int | None, caches: int | None, limit: int | None
) -> None:
    assert store_limits(WorkerSettings(prefix_cache_ram=given), caches).ram == limit
