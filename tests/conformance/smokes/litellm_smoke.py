"""LiteLLM's providers for such servers: OpenAI's, vLLM's and Anthropic's."""

from __future__ import annotations

import json
import os

from checks import ASKED, BASE, FUNCTION, KEY, MODEL, V1, Thing, check, main

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch it from the network
import litellm

litellm.suppress_debug_info = True
PROVIDERS = {"openai": V1, "hosted_vllm": V1, "anthropic": BASE}


def checks_of(provider: str, base: str) -> None:
    asked = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": KEY,
        "messages": [{"role": "user", "content": ASKED}],
        "max_tokens": 200,
        "num_retries": 0,
    }
    tools = [{"type": "function", "function": FUNCTION}]

    def plain() -> None:
        answer = litellm.completion(**asked)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens

    def streamed() -> None:
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        whole = litellm.stream_chunk_builder(chunks)
        assert len(chunks) > 2
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens

    def tool() -> None:
        answer = litellm.completion(**asked, tools=tools, tool_choice="required")
        arguments = answer.choices[0].message.tool_calls[0].function.arguments
        assert json.loads(arguments)["city"] in ("Paris", "Rome")

    def structured() -> None:
        answer = litellm.completion(**asked, response_format=Thing)
        Thing.model_validate_json(answer.choices[0].message.content)

    for function in (plain, streamed, tool, structured):
        function.__name__ = f"{provider}.{function.__name__}"
        check(function)


for each, at in PROVIDERS.items():
    checks_of(each, at)
main()
