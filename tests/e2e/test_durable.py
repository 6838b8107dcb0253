"""OpenAI's and Anthropic's SDKs: retries with an idempotency key through a proxy that cuts connections, and
responses in the background, typed."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseQueuedEvent

from tests.faults.cutting_proxy import CuttingProxy, cutting
from tests.faults.streams import scripted
from tests.system import System

TOKENS = 60
PROMPT = f"go !tokens={TOKENS} !slow=2"
TEXT = scripted(PROMPT, TOKENS)


@pytest.fixture
def proxy(system: System) -> Iterator[CuttingProxy]:
    with cutting(system.port) as proxy:
        yield proxy


def tokens(system: System) -> int:
    """Return the number of tokens that the scripted worker has computed."""
    [fake] = [model for model in system.http.get("/v1/status").json()["models"] if model["model"] == "fake"]
    return int(fake["answered_tokens"])


def openais(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=4, timeout=60)


def key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4())}


def joined(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_openais_sdk_repeats_the_key_in_its_retries_and_the_answer_is_computed_once(
    system: System, proxy: CuttingProxy
) -> None:
    before = tokens(system)
    proxy.cuts = [1, 40]
    with openais(proxy.port) as client:
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": PROMPT}], extra_headers=key()
        )
    assert answer.choices[0].message.content == TEXT
    assert len(proxy.exchanges) == 3
    lines = b"".join(sent for sent, _ in proxy.exchanges).lower().split(b"\r\n")
    assert len({line for line in lines if b"idempotency" in line}) == 1
    assert tokens(system) - before == TOKENS + 1


def test_anthropics_sdk_repeats_the_key_in_its_retries(system: System, proxy: CuttingProxy) -> None:
    before = tokens(system)
    proxy.cuts = [1]
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{proxy.port}", api_key="none", max_retries=4, timeout=60
    ) as client:
        asked = {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": PROMPT}]}
        with client.messages.stream(**asked, extra_headers=key()) as events:  # type: ignore[arg-type]
            text = events.get_final_text()
    assert text == TEXT
    assert tokens(system) - before == TOKENS + 1


def test_a_stream_that_is_cut_is_read_again_by_its_key_or_on_by_its_id(
    system: System, proxy: CuttingProxy
) -> None:
    before, headers = tokens(system), key()
    proxy.cuts = [2500]
    had: list[ChatCompletionChunk] = []
    with openais(proxy.port) as client:

        def read() -> str:
            had.clear()
            chunks = client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": PROMPT}],
                stream=True,
                extra_headers=headers,
            )
            for chunk in chunks:
                had.append(chunk)
            return joined(had)

        with pytest.raises((openai.APIError, Exception), match=r"(?i)peer|connection|closed|incomplete"):
            read()
        rest = client.get(
            f"/chat/completions/{had[0].id}/stream",
            cast_to=ChatCompletionChunk,
            options={"params": {"starting_after": len(had)}},
            stream=True,
            stream_cls=openai.Stream[ChatCompletionChunk],
        )
        assert joined([*had, *rest]) == TEXT
        assert read() == TEXT
    assert tokens(system) - before == TOKENS + 1


def test_a_stream_in_the_background_is_taken_up_after_the_last_event(system: System) -> None:
    with openais(system.port) as client:
        first, id, last = [], "", 0
        with client.responses.create(model="fake", input=PROMPT, background=True, stream=True) as events:
            for event in events:
                first.append(event)
                last = event.sequence_number
                if event.type == "response.created":
                    id = event.response.id
                if last >= 20:
                    break
        assert isinstance(first[1], ResponseQueuedEvent)
        rest = list(client.responses.retrieve(id, stream=True, starting_after=last))
        numbers = [event.sequence_number for event in (*first, *rest)]
        assert numbers == list(range(len(numbers)))
        deltas = [e.delta for e in (*first, *rest) if e.type == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
        assert rest[-1].type == "response.completed"
        long = client.responses.create(model="fake", input="!tokens=5000 !slow=5", background=True)
        assert client.responses.cancel(long.id).status == "cancelled"
