"""Bodies of OpenAI's batches and the expiration of files: what is wrong is refused with its parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.api.batches.body import ENDPOINTS, EXPIRES_S_MIN, read_batch, read_expiry
from protocol.errors import RequestError

GOOD: dict[str, Any] = {"input_file_id": "file-1", "endpoint": ENDPOINTS[0], "completion_window": "24h"}
EXPIRY = {"anchor": "created_at", "seconds": EXPIRES_S_MIN}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"output_expires_after": EXPIRY | {"anchor": "now"}}, "output_expires_after.anchor"),
        ({"output_expires_after": EXPIRY | {"seconds": 10}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_wrong_parameter_is_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_batch(json.dumps(GOOD | wrong).encode())
    assert caught.value.param == param


def test_a_batch_with_all_parameters_is_read() -> None:
    given = {"metadata": {"k" * 64: "x" * 512}, "output_expires_after": EXPIRY}
    body = read_batch(json.dumps(GOOD | given).encode())
    assert (body.endpoint, body.metadata) == (ENDPOINTS[0], given["metadata"])
    assert body.output_expires_after is not None
    assert body.output_expires_after.seconds == EXPIRES_S_MIN


def test_the_age_of_a_file_comes_from_its_form() -> None:
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    assert read_expiry({"purpose": "batch"}) is None
    assert read_expiry({anchor: "created_at", seconds: "7200"}) == 7200
    for form, param in (
        ({anchor: "created_at"}, seconds),
        ({anchor: "created_at", seconds: "soon"}, seconds),
        ({anchor: "created_at", seconds: "٣"}, seconds),
        ({seconds: "7200"}, "expires_after.anchor"),
        ({anchor: "created_at", seconds: "1"}, "expires_after.seconds"),
    ):
        with pytest.raises(RequestError) as caught:
            read_expiry(form)
        assert caught.value.param == param, form
