"""instructor: objects by tools and by schema, streamed or not, over chat, responses and messages."""

from __future__ import annotations

import instructor
from anthropic import Anthropic
from checks import ASKED, BASE, KEY, MODEL, V1, Rich, check, main
from openai import OpenAI

openai = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
anthropic = Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "response_model": Rich}
Mode = instructor.Mode
CLIENTS = {
    "tools": instructor.from_openai(openai, mode=Mode.TOOLS),
    "json_schema": instructor.from_openai(openai, mode=Mode.JSON_SCHEMA),
    "responses_tools": instructor.from_openai(openai, mode=Mode.RESPONSES_TOOLS),
    "anthropic_tools": instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_TOOLS),
}


def checks_of(name: str, client: instructor.Instructor) -> None:
    told = asked | {"max_retries": 0, "max_tokens": 200}

    def plain() -> None:
        assert isinstance(client.create(**told), Rich)

    def streamed() -> None:
        *_, last = client.create_partial(**told)
        assert last.colour in ("red", "green")
        assert last.ok is not None

    for function in (plain, streamed):
        function.__name__ = f"{name}.{function.__name__}"
        check(function)


for each, client in CLIENTS.items():
    checks_of(each, client)
main()
