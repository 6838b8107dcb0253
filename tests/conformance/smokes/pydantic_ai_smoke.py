"""pydantic-ai's models of OpenAI (chat and responses) and Anthropic."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from checks import ASKED, BASE, KEY, MODEL, V1, Rich, Thing, check, main
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=V1, api_key=KEY)
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=BASE, api_key=KEY))
structured = ModelProfile(supports_json_schema_output=True)  # it does not know the model's name
MODELS: dict[str, Model] = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=anthropic, profile=structured),
}


def checks_of(name: str, model: Model) -> None:
    told = {"model_settings": {"max_tokens": 200}}

    def plain() -> None:
        answer = Agent(model, **told).run_sync(ASKED)
        assert answer.output
        assert answer.usage.output_tokens

    def streamed() -> None:
        pieces = list(Agent(model, **told).run_stream_sync(ASKED).stream_text(delta=True, debounce_by=None))
        assert len(pieces) > 1

    def tool() -> None:
        assert isinstance(Agent(model, output_type=ToolOutput(Rich), **told).run_sync(ASKED).output, Rich)

    def structured() -> None:
        assert isinstance(Agent(model, output_type=NativeOutput(Thing), **told).run_sync(ASKED).output, Thing)

    for function in (plain, streamed, tool, structured):
        function.__name__ = f"{name}.{function.__name__}"
        check(function)


for each, model in MODELS.items():
    checks_of(each, model)
main()
