"""`inspection.js`: view of a captured request."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.broker.page.scripts import Call


def kept(**told: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1", "path": "/v1/chat/completions", "model": "org/model", "code": "stop",
        "prompt_tokens": 4, "answered": 2, "reuse": {"tokens": 3, "tier": "ram", "miss": "diverged_at_3"},
        "prompt": {"tokens": [1, 2, 3, 4]}, "answer": {"tokens": [5, 6]},
    } | told  # fmt: skip


def test_cached_prompt_tokens_are_separated_from_computed_ones(call: Call) -> None:
    assert call("inspection.js", "halves", kept()) == {"cached": [1, 2, 3], "computed": [4]}
    assert call("inspection.js", "halves", kept(reuse=None)) == {"cached": [], "computed": [1, 2, 3, 4]}


def test_why_no_more_came_from_the_cache_is_told(call: Call) -> None:
    assert call("inspection.js", "reuse", kept(reuse=None)) == "The prefix cache usage is unknown."
    words = "3 of 4 prompt tokens came from ram (75%). Miss reason: diverged at 3."
    assert call("inspection.js", "reuse", kept()) == words


def test_likelihoods_are_those_of_the_answer_alone(call: Call) -> None:
    asked = call("inspection.js", "scoring", kept())
    assert (asked["prompt"], asked["max_tokens"], asked["echo"]) == ([1, 2, 3, 4, 5, 6], 0, True)
    logprobs = {
        "tokens": ["<", "user", ">", "Hi", "Hel", ""],
        "token_logprobs": [None, -1, -1, -1, math.log(0.5), 0],
        "top_logprobs": [None, {}, {}, {}, {"Hel": math.log(0.5), "Yo": math.log(0.25)}, None],
    }
    told = call("inspection.js", "likelihoods", kept(), {"choices": [{"logprobs": logprobs}]})
    assert [(token["text"], round(token["share"], 6)) for token in told] == [("Hel", 0.5), ("▪", 1)]
    assert told[0]["label"] == '50%; most likely: "Hel" 50%, "Yo" 25%'


def test_a_body_is_laid_out_and_its_images_are_shortened(call: Call) -> None:
    body = {"image_url": {"url": "data:image/png;base64," + "A" * 500}, "text": "B" * 500}
    told = json.loads(call("inspection.js", "laidOut", json.dumps(body)))
    assert told["text"] == body["text"]
    assert told["image_url"]["url"].endswith("… (522 characters)")
    assert call("inspection.js", "laidOut", '{"cut') == '{"cut'
