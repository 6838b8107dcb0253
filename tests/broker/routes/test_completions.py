"""POST /v1/completions, to a worker and back."""

from __future__ import annotations

from tests.broker.application import House
from tests.broker.asgi import run
from tests.factories import accepted, events, finished, reused


def test_a_completion_goes_on_with_its_prompts(roomy: House) -> None:
    async def talk() -> None:
        answer = roomy.text(["Once", "Twice"], n=2)
        await roomy.arrived(4)
        assert [request.prompt for request in roomy.requests()] == ["Once", "Once", "Twice", "Twice"]
        for number, request in enumerate(roomy.requests()):
            roomy.line.say("w", events("w", request.id, f"{number}", ""), finished("w", request.id, 2))
        document = (await answer.end()).json
        assert document["object"] == "text_completion"
        assert [choice["text"] for choice in document["choices"]] == ["0", "1", "2", "3"]
        assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (6, 8)

    run(talk())


def test_a_streamed_completion_begins_when_it_is_accepted(house: House) -> None:
    async def talk() -> None:
        answer = house.text(stream=True)
        id = await house.arrived()
        house.line.say("w", accepted("w", id), reused("w", id))
        await answer.started()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        house.line.say("w", events("w", id, " upon"), finished("w", id))
        await answer.end()
        assert b'"text":" upon"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")

    run(talk())


def test_a_bad_completion_reaches_no_worker(house: House) -> None:
    async def talk() -> None:
        answer = await house.text(best_of=3).end()
        assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")

    run(talk())
    assert house.requests() == []
