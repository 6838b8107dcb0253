"""LangChain's chat models of OpenAI (chat and responses) and Anthropic."""

from __future__ import annotations

from typing import Literal

from checks import ASKED, BASE, KEY, MODEL, V1, Rich, Thing, check, main
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"{city}: 21 degrees"


OPENAI = {"model": MODEL, "base_url": V1, "api_key": KEY, "max_retries": 0, "max_tokens": 200}
MODELS: dict[str, BaseChatModel] = {
    "chat": ChatOpenAI(**OPENAI, stream_usage=True),
    "responses": ChatOpenAI(**OPENAI, use_responses_api=True),
    "messages": ChatAnthropic(model=MODEL, base_url=BASE, api_key=KEY, max_retries=0, max_tokens=200),
}


def checks_of(name: str, model: BaseChatModel) -> None:
    def plain() -> None:
        answer = model.invoke(ASKED)
        assert answer.text
        assert answer.usage_metadata["output_tokens"]

    def streamed() -> None:
        pieces = list(model.stream(ASKED))
        assert len([piece for piece in pieces if piece.text]) > 1
        assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces)

    def tool_streamed() -> None:
        whole = None
        for piece in model.bind_tools([get_weather], tool_choice="any").stream(ASKED):
            whole = piece if whole is None else whole + piece
        assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")

    def structured() -> None:
        answer = model.with_structured_output(Thing, method="json_schema").invoke(ASKED)
        assert isinstance(answer, Thing)

    def structured_by_tool() -> None:
        answer = model.with_structured_output(Rich, method="function_calling").invoke(ASKED)
        assert isinstance(answer, Rich)

    for function in (plain, streamed, tool_streamed, structured, structured_by_tool):
        function.__name__ = f"{name}.{function.__name__}"
        check(function)


for each, model in MODELS.items():
    checks_of(each, model)
main()
