"""Sample messages of every type: with every field set, with only the required ones, and of earlier versions.

`golden.json` has their encoded form. Its frames have been on the wire and are never edited. To add a sample,
run `python -m tests.protocol.samples`, which prints the new file for comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from protocol import wire
from protocol.conversation import pack
from protocol.messages import (
    Accepted,
    AdaptersChanged,
    Adopt,
    CacheCleared,
    Cancel,
    ClearCache,
    Draining,
    Embed,
    EmbeddingChunk,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    Loading,
    Message,
    PrefixHit,
    PromptLogprobs,
    Rank,
    Ready,
    Rejected,
    StepOutputs,
    ToGateway,
    ToWorker,
    UnloadAdapter,
    Welcome,
)
from protocol.types import (
    AdapterInfo,
    AdoptedRow,
    CallDelta,
    Capabilities,
    Delta,
    Exactness,
    ExpertStatus,
    ImageStatus,
    KVCacheQuantization,
    Media,
    OrphanedRow,
    PassCheck,
    PrefixReuse,
    PrefixStatus,
    PreparationStatus,
    PromptToken,
    RankMemory,
    RequestStatus,
    Resources,
    Sampling,
    SparsePrefill,
    SpecDecodeStats,
    SpecDecodeStatus,
    StructuredOutput,
    Timings,
    TokenizeOptions,
    TokenLogprob,
    ToolCallConstraint,
    TopPrefix,
    Usage,
)

GOLDEN = Path(__file__).with_name("golden.json")
UNIONS = {"to_worker": ToWorker, "to_gateway": ToGateway}
Decoder = Callable[[Sequence[bytes]], tuple[Message, Sequence[bytes]]]
DECODERS: dict[str, Decoder] = {
    "to_worker": wire.decode_to_worker,
    "to_gateway": wire.decode_to_gateway,
}

GATEWAY, WORKER = "6761746577617931", "776f726b65723031"
REUSE = PrefixReuse(tokens=256, tier="disk", miss="diverged")
SPARSELY = replace(REUSE, left_out=[(64, 96), (128, 70000)])
ADAPTER = AdapterInfo(name="sql", digest="5f" * 16, rank=16, bytes=2**22, folder="/srv/adapters/駅")
IMAGE = b"\x89PNG\r\n\x1a\n and the rest"

FULL: list[Message] = [
    Welcome(incarnation=GATEWAY, version=1, orphan_s=62.5),
    Adopt(
        incarnation=GATEWAY,
        rows=[AdoptedRow(id="chatcmpl-1~2", deltas=300, scored=70000, accepted=True, reused=True)],
    ),
    Rejected(incarnation=GATEWAY, reason="it speaks protocol 2, this gateway 1"),
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[
            Media(
                frame=0,
                frames=2,
                mime="image/png",
                sha256="ab" * 32,
                pixels_max=2**18,
                param="messages[1].content[0]",
                pixels=2**20,
            )
        ],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
        thinking_budget=1024,
        speculation=False,
        prediction="def 駅(): ...",
        sparse=SparsePrefill(keep=0.25, above=70000),
        left_out=[(64, 96), (128, 70000)],
        tokens=[1, 151643],
        suffix="\n    return 駅",
        source="prompt[1]",
        echo=True,
        scored=1024,
        form=StructuredOutput(
            kind="choice", text='["rot","駅"]', param="structured_outputs.choice", strict=False
        ),
        calling=ToolCallConstraint(required=True, name="switch", single=True, strict=["switch"]),
        tokenizing=TokenizeOptions(tokens=True, pieces=True, special=False, opens_turn=False),
        client="5f" * 8,
        adapter="rails-3.8@駅",
    ),
    Embed(
        incarnation=GATEWAY,
        id="embd-1",
        texts=pack(["駅はどこ?", [1, 151643]]),
        count=2,
        tokens_max=512,
        source="texts",
        priority=-3,
        deadline_s=2.5,
        answered=[1],
        client="5f" * 8,
        dimensions=256,
    ),
    Rank(
        incarnation=GATEWAY,
        id="rerank-1",
        texts=pack(["am Bahnhof", "駅"]),
        count=2,
        tokens_max=512,
        source="documents",
        priority=-3,
        deadline_s=2.5,
        answered=[0],
        client="5f" * 8,
        query="駅はどこ?",
        instruction="Find the station.",
    ),
    Cancel(incarnation=GATEWAY, id="chatcmpl-1"),
    ClearCache(incarnation=GATEWAY, id="clear-1", namespace="9f2c"),
    Hello(
        incarnation=WORKER,
        version=1,
        model="org/model",
        pid=4242,
        versions={"mlx": "0.32.4"},
        host="mac-studio.local",
        rows=[OrphanedRow(id="chatcmpl-1~2", deltas=300, first=70, whole=True)],
    ),
    Loading(incarnation=WORKER, done=2**33, total=2**34),
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(
            images=True,
            videos=True,
            tools=True,
            thinking=True,
            system_in_place=True,
            generation=False,
            embeddings=True,
            rerank=True,
        ),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
        start_s={"imports": 2.5, "weights": 0.125},
        store="mac-studio.local:801:2f",
        plan="org/model, tensor over 2 processes",
        stands_in=True,
        adapters=[ADAPTER],
        token_bytes_max=128,
        exactness=Exactness(
            checks=[
                PassCheck(kind="verify", rows=16, tokens=2, differs_at=3, difference=0.125),
                PassCheck(kind="decode", rows=4),
            ],
            is_complete=False,
            rows_max=8,
            draft_tokens_max=0,
            chip=["bfloat16 matrix products are wrong"],
        ),
        kv_quantization=KVCacheQuantization(bits=8, group_size=64, start=5000),
        max_kv_size=4096,
    ),
    Heartbeat(
        incarnation=WORKER,
        running=3,
        waiting=70000,
        steps=2**40,
        cache_bytes=2**36,
        rows=[
            RequestStatus(
                id="chatcmpl-1",
                phase="decode",
                prompt_tokens=300,
                prefilled=300,
                answered=12,
                seconds=2.5,
                first_token_s=0.25,
                reuse=SPARSELY,
                preemptions=2,
                work=5,
            ),
            RequestStatus(id="chatcmpl-2", phase="waiting", prompt_tokens=70000),
        ],
        prefix=PrefixStatus(
            ram_bytes=2**32,
            ram_limit=2**33,
            disk_bytes=2**34,
            disk_limit=2**35,
            blocks=90,
            snapshots=7,
            lookups=1000,
            hits=960,
            prompt_tokens=2**33,
            reused_tokens=2**32,
            misses={"diverged": 30, "evicted": 10},
            top=[TopPrefix(tokens=1500, uses=950, bytes=2**28, pinned=True)],
            read_timeouts=3,
        ),
        starved=2,
        resources=Resources(
            resident_bytes=2**34,
            device_bytes=2**35,
            device_peak_bytes=2**36,
            device_spare_bytes=2**30,
            footprint_bytes=2**37,
            uptime_s=86400.5,
            ranks=[
                RankMemory(
                    rank=1,
                    host="mac-2",
                    resident_bytes=2**33,
                    device_bytes=2**34,
                    device_peak_bytes=2**35,
                    device_spare_bytes=2**29,
                    footprint_bytes=2**36,
                )
            ],
            experts=ExpertStatus(
                slots=32, experts=128, bytes=2**33, wanted=2**40, read=2**20, read_bytes=2**44, read_s=12.5
            ),
        ),
        images=ImageStatus(bytes=2**24, bytes_max=2**28, kept=12, encoded=70000, hits=2**40),
        drafts=SpecDecodeStatus(
            accepted=2**40,
            rejected=2**20,
            sources={"lookup": SpecDecodeStats(accepted=2**40, rejected=2**20)},
        ),
        preparation=PreparationStatus(
            waiting=70000,
            running=2,
            bytes=2**27,
            oldest_s=0.5,
            started=2**40,
            waited_s=2.5,
            refused=3,
            cancelled=70000,
        ),
    ),
    Accepted(
        incarnation=WORKER,
        id="chatcmpl-1",
        prompt_tokens=300,
        prompt="<s>駅",
        tokens=[1, 151643],
        pieces=["<s>", "駅"],
        relaxed=["oneOf", "uniqueItems"],
    ),
    PrefixHit(incarnation=WORKER, id="chatcmpl-1", reuse=SPARSELY),
    PromptLogprobs(
        incarnation=WORKER,
        id="chatcmpl-1",
        first=1024,
        tokens=[
            PromptToken(bytes=b"a", logprob=-0.5, top=[(b"b", -0.25), (b"", -1e30)]),
            PromptToken(bytes=b"\xe9\xa7"),
        ],
    ),
    StepOutputs(
        incarnation=WORKER,
        deltas=[
            Delta(
                id="chatcmpl-1",
                sequence=0,
                tokens=[151643],
                text="駅",
                likelihoods=[
                    TokenLogprob(bytes=b"\xe9\xa7", logprob=-0.5, top=[(b"a", -0.25), (b"", -1e30)])
                ],
                reasoning="次は…",
                calls=[
                    CallDelta(index=0, id="call_0f", name="switch", arguments='{"to":'),
                    CallDelta(index=1, arguments='"駅"}'),
                ],
            ),
            Delta(id="chatcmpl-2", sequence=511, tokens=[7, 8], text=""),
        ],
    ),
    EmbeddingChunk(
        incarnation=WORKER, id="embd-1", sequence=1, places=[1, 0], vectors=bytes.fromhex("0000803f000080bf")
    ),
    Finished(
        incarnation=WORKER,
        id="chatcmpl-1",
        reason="length",
        usage=Usage(
            prompt_tokens=300,
            completion_tokens=64,
            cached_tokens=256,
            reasoning_tokens=48,
            accepted_tokens=40,
            rejected_tokens=5,
            sparse_tokens=70000,
        ),
        timings=Timings(queued_s=0.25, prefill_s=1.5, decode_s=3.125),
        stop="</end>",
        continued_by="org/small, one process alone",
    ),
    Failed(
        incarnation=WORKER,
        id="chatcmpl-1",
        code="context_length_exceeded",
        message="This model's maximum context length is 8192 tokens.",
        param="messages",
        details={"prompt_tokens": 9000, "context_length": 8192},
    ),
    CacheCleared(incarnation=WORKER, id="clear-1", ram_bytes=2**32, disk_bytes=2**34, namespace="9f2c"),
    LoadAdapter(incarnation=GATEWAY, name="sql", folder="/srv/adapters/駅"),
    UnloadAdapter(incarnation=GATEWAY, name="sql"),
    AdaptersChanged(
        incarnation=WORKER, name="sql", error="it has no adapter_config.json", adapters=[ADAPTER]
    ),
    Draining(incarnation=WORKER),
    Goodbye(incarnation=WORKER, reason="asked to stop", died=True),
]

LEAST: list[Message] = [
    Welcome(incarnation=GATEWAY, version=1),
    Adopt(incarnation=GATEWAY, rows=[]),
    Rejected(incarnation=GATEWAY, reason=""),
    Generate(incarnation=GATEWAY, id="a", sampling=Sampling(seed=0)),
    Embed(incarnation=GATEWAY, id="a", texts=pack([""]), count=1),
    Rank(incarnation=GATEWAY, id="a", texts=pack([""]), count=1, query=""),
    Cancel(incarnation=GATEWAY, id="a"),
    ClearCache(incarnation=GATEWAY, id="c"),
    Hello(incarnation=WORKER, version=1, model="m", pid=1),
    Loading(incarnation=WORKER, done=0, total=0),
    Ready(incarnation=WORKER, model="m", context_length=0, running_max=1),
    Heartbeat(incarnation=WORKER, running=0, waiting=0, steps=0),
    Accepted(incarnation=WORKER, id="a", prompt_tokens=1),
    PrefixHit(incarnation=WORKER, id="a", reuse=PrefixReuse()),
    PromptLogprobs(incarnation=WORKER, id="a", first=0, tokens=[PromptToken(bytes=b"")]),
    StepOutputs(incarnation=WORKER, deltas=[Delta(id="a", sequence=0, tokens=[])]),
    EmbeddingChunk(incarnation=WORKER, id="a", sequence=0, places=[], vectors=b""),
    Finished(incarnation=WORKER, id="a", reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=0)),
    Failed(incarnation=WORKER, id="a", code="engine_error", message=""),
    CacheCleared(incarnation=WORKER, id="c", ram_bytes=0, disk_bytes=0),
    LoadAdapter(incarnation=GATEWAY, name="a", folder="/a"),
    UnloadAdapter(incarnation=GATEWAY, name="a"),
    AdaptersChanged(incarnation=WORKER, name="a"),
    Draining(incarnation=WORKER),
    Goodbye(incarnation=WORKER, reason=""),
]

EARLIER: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(seed=2**63 - 1, temperature=0.7, top_p=0.95, top_k=40, min_p=0.05),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
    ),
    StepOutputs(
        incarnation=WORKER,
        deltas=[
            Delta(id="chatcmpl-1", sequence=0, tokens=[151643], text="駅"),
            Delta(id="chatcmpl-2", sequence=511, tokens=[7, 8], text=""),
        ],
    ),
]
"""Messages of `FULL` before these messages had all their fields, as peers of that version send them."""

BEFORE_REUSE: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
    ),
    Heartbeat(incarnation=WORKER, running=3, waiting=70000, steps=2**40, cache_bytes=2**36),
]
"""Messages of `FULL` before prefix reuse."""

BEFORE_RESUME: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
    ),
]
"""Messages of `FULL` before answers could be resumed."""

BEFORE_BUDGETS: list[Message] = [
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(images=True, tools=True, thinking=True, system_in_place=True),
    ),
]
"""Messages of `FULL` before workers reported their memory budgets."""

BEFORE_SWAPS: list[Message] = [
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(images=True, tools=True, thinking=True, system_in_place=True),
        cache_bytes_max=2**36,
        tokens_max=2**22,
    ),
]
"""Messages of a worker before models could be swapped under one name."""

BEFORE_CHANNELS: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
    ),
    Accepted(incarnation=WORKER, id="chatcmpl-1", prompt_tokens=300),
    StepOutputs(
        incarnation=WORKER,
        deltas=[
            Delta(
                id="chatcmpl-1",
                sequence=0,
                tokens=[151643],
                text="駅",
                likelihoods=[
                    TokenLogprob(bytes=b"\xe9\xa7", logprob=-0.5, top=[(b"a", -0.25), (b"", -1e30)])
                ],
            ),
            Delta(id="chatcmpl-2", sequence=511, tokens=[7, 8], text=""),
        ],
    ),
    Finished(
        incarnation=WORKER,
        id="chatcmpl-1",
        reason="length",
        usage=Usage(prompt_tokens=300, completion_tokens=64, cached_tokens=256),
        timings=Timings(queued_s=0.25, prefill_s=1.5, decode_s=3.125),
    ),
]
"""Messages of `FULL` before reasoning was separated from content, and before prompts were echoed."""

BEFORE_CALLS: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
        thinking_budget=1024,
        tokens=[1, 151643],
        suffix="\n    return 駅",
        source="prompt[1]",
        echo=True,
        scored=1024,
    ),
    StepOutputs(
        incarnation=WORKER,
        deltas=[
            Delta(
                id="chatcmpl-1",
                sequence=0,
                tokens=[151643],
                text="駅",
                likelihoods=[
                    TokenLogprob(bytes=b"\xe9\xa7", logprob=-0.5, top=[(b"a", -0.25), (b"", -1e30)])
                ],
                reasoning="次は…",
            ),
            Delta(id="chatcmpl-2", sequence=511, tokens=[7, 8], text=""),
        ],
    ),
]
"""Messages of `FULL` before tool calls were separated from content, and before structured output."""

BEFORE_COUNTS: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
        thinking_budget=1024,
        tokens=[1, 151643],
        suffix="\n    return 駅",
        source="prompt[1]",
        echo=True,
        scored=1024,
        form=StructuredOutput(kind="choice", text='["rot","駅"]', param="structured_outputs.choice"),
        calling=ToolCallConstraint(required=True, name="switch", single=True, strict=["switch"]),
    ),
    Accepted(incarnation=WORKER, id="chatcmpl-1", prompt_tokens=300, prompt="<s>駅"),
    Finished(
        incarnation=WORKER,
        id="chatcmpl-1",
        reason="length",
        usage=Usage(prompt_tokens=300, completion_tokens=64, cached_tokens=256, reasoning_tokens=48),
        timings=Timings(queued_s=0.25, prefill_s=1.5, decode_s=3.125),
    ),
    Failed(
        incarnation=WORKER,
        id="chatcmpl-1",
        code="context_length_exceeded",
        message="This model's maximum context length is 8192 tokens.",
        param="messages",
    ),
]
"""Messages of `FULL` before token counting, and before ends had a stop string and failures had details."""

BEFORE_TEXTS: list[Message] = [
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(images=True, tools=True, thinking=True, system_in_place=True),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
    ),
]
"""Messages of `FULL` before embedding and reranking models."""
BEFORE_VIDEOS: list[Message] = [
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[Media(frame=0, mime="image/png", sha256="ab" * 32)],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
        thinking_budget=1024,
        tokens=[1, 151643],
        suffix="\n    return 駅",
        source="prompt[1]",
        echo=True,
        scored=1024,
        form=StructuredOutput(kind="choice", text='["rot","駅"]', param="structured_outputs.choice"),
        calling=ToolCallConstraint(required=True, name="switch", single=True, strict=["switch"]),
        tokenizing=TokenizeOptions(tokens=True, pieces=True, special=False, opens_turn=False),
    ),
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(
            images=True,
            tools=True,
            thinking=True,
            system_in_place=True,
            generation=False,
            embeddings=True,
            rerank=True,
        ),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
    ),
]
"""Messages of `FULL` before videos and image limits."""

BEFORE_LAPS: list[Message] = [
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(
            images=True,
            videos=True,
            tools=True,
            thinking=True,
            system_in_place=True,
            generation=False,
            embeddings=True,
            rerank=True,
        ),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
    ),
]
"""Messages of `FULL` before workers reported their start-up times."""

BEFORE_IMAGES: list[Message] = [
    Heartbeat(
        incarnation=WORKER,
        running=3,
        waiting=70000,
        steps=2**40,
        cache_bytes=2**36,
        rows=[
            RequestStatus(
                id="chatcmpl-1",
                phase="decode",
                prompt_tokens=300,
                prefilled=300,
                answered=12,
                seconds=2.5,
                first_token_s=0.25,
                reuse=REUSE,
            ),
            RequestStatus(id="chatcmpl-2", phase="waiting", prompt_tokens=70000),
        ],
        prefix=PrefixStatus(
            ram_bytes=2**32,
            ram_limit=2**33,
            disk_bytes=2**34,
            disk_limit=2**35,
            blocks=90,
            snapshots=7,
            lookups=1000,
            hits=960,
            prompt_tokens=2**33,
            reused_tokens=2**32,
            misses={"diverged": 30, "evicted": 10},
            top=[TopPrefix(tokens=1500, uses=950, bytes=2**28, pinned=True)],
        ),
    ),
]
"""Messages of `FULL` before encoded images were cached."""

BEFORE_RESOURCES: list[Message] = [
    Heartbeat(
        incarnation=WORKER,
        running=3,
        waiting=70000,
        steps=2**40,
        cache_bytes=2**36,
        rows=[
            RequestStatus(
                id="chatcmpl-1",
                phase="decode",
                prompt_tokens=300,
                prefilled=300,
                answered=12,
                seconds=2.5,
                first_token_s=0.25,
                reuse=REUSE,
            ),
            RequestStatus(id="chatcmpl-2", phase="waiting", prompt_tokens=70000),
        ],
        prefix=PrefixStatus(
            ram_bytes=2**32,
            ram_limit=2**33,
            disk_bytes=2**34,
            disk_limit=2**35,
            blocks=90,
            snapshots=7,
            lookups=1000,
            hits=960,
            prompt_tokens=2**33,
            reused_tokens=2**32,
            misses={"diverged": 30, "evicted": 10},
            top=[TopPrefix(tokens=1500, uses=950, bytes=2**28, pinned=True)],
        ),
        images=ImageStatus(bytes=2**24, bytes_max=2**28, kept=12, encoded=70000, hits=2**40),
    ),
]
"""Messages of `FULL` before workers reported their resource usage."""

BEFORE_DRAFTS: list[Message] = [
    Heartbeat(
        incarnation=WORKER,
        running=3,
        waiting=70000,
        steps=2**40,
        cache_bytes=2**36,
        rows=[
            RequestStatus(
                id="chatcmpl-1",
                phase="decode",
                prompt_tokens=300,
                prefilled=300,
                answered=12,
                seconds=2.5,
                first_token_s=0.25,
                reuse=REUSE,
                preemptions=2,
            ),
            RequestStatus(id="chatcmpl-2", phase="waiting", prompt_tokens=70000),
        ],
        prefix=PrefixStatus(
            ram_bytes=2**32,
            ram_limit=2**33,
            disk_bytes=2**34,
            disk_limit=2**35,
            blocks=90,
            snapshots=7,
            lookups=1000,
            hits=960,
            prompt_tokens=2**33,
            reused_tokens=2**32,
            misses={"diverged": 30, "evicted": 10},
            top=[TopPrefix(tokens=1500, uses=950, bytes=2**28, pinned=True)],
        ),
        resources=Resources(
            resident_bytes=2**34,
            device_bytes=2**35,
            device_peak_bytes=2**36,
            device_spare_bytes=2**30,
            uptime_s=86400.5,
        ),
        images=ImageStatus(bytes=2**24, bytes_max=2**28, kept=12, encoded=70000, hits=2**40),
    ),
    Generate(
        incarnation=GATEWAY,
        id="chatcmpl-1",
        sampling=Sampling(
            seed=2**63 - 1,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100.0, 7: 1.5},
            logprobs=20,
        ),
        messages=pack(
            [
                {"role": "system", "content": "Du bist der Fahrdienstleiter."},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
            ]
        ),
        prompt="raw",
        tools=pack([{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}]),
        template_kwargs=pack({"enable_thinking": False, "budget": 1.5, "nothing": None}),
        media=[
            Media(
                frame=0,
                frames=2,
                mime="image/png",
                sha256="ab" * 32,
                pixels_max=2**18,
                param="messages[1].content[0]",
            )
        ],
        stop=["\n\n", "</end>"],
        max_tokens=64,
        ignore_eos=True,
        priority=-3,
        deadline_s=2.5,
        cache_salt="Mieter 7 駅",
        cache_pin=True,
        resume=[0, 70000],
        thinking_budget=1024,
        tokens=[1, 151643],
        suffix="\n    return 駅",
        source="prompt[1]",
        echo=True,
        scored=1024,
        form=StructuredOutput(kind="choice", text='["rot","駅"]', param="structured_outputs.choice"),
        calling=ToolCallConstraint(required=True, name="switch", single=True, strict=["switch"]),
        tokenizing=TokenizeOptions(tokens=True, pieces=True, special=False, opens_turn=False),
    ),
    Finished(
        incarnation=WORKER,
        id="chatcmpl-1",
        reason="length",
        usage=Usage(prompt_tokens=300, completion_tokens=64, cached_tokens=256, reasoning_tokens=48),
        timings=Timings(queued_s=0.25, prefill_s=1.5, decode_s=3.125),
        stop="</end>",
    ),
]
"""Messages of `FULL` before speculative decoding."""

BEFORE_REPLICAS: list[Message] = [
    Hello(incarnation=WORKER, version=1, model="org/model", pid=4242, versions={"mlx": "0.32.4"}),
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(
            images=True,
            videos=True,
            tools=True,
            thinking=True,
            system_in_place=True,
            generation=False,
            embeddings=True,
            rerank=True,
        ),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
        start_s={"imports": 2.5, "weights": 0.125},
    ),
]
"""Messages of `FULL` before replicas of a model were distinguished."""

BEFORE_PLANS: list[Message] = [
    Ready(
        incarnation=WORKER,
        model="org/model",
        context_length=262144,
        running_max=16,
        parameters=2**35,
        capabilities=Capabilities(
            images=True,
            videos=True,
            tools=True,
            thinking=True,
            system_in_place=True,
            generation=False,
            embeddings=True,
            rerank=True,
        ),
        cache_bytes_max=2**36,
        tokens_max=2**22,
        identity="0f" * 16,
        start_s={"imports": 2.5, "weights": 0.125},
        store="mac-studio.local:801:2f",
    ),
    Finished(
        incarnation=WORKER,
        id="chatcmpl-1",
        reason="length",
        usage=Usage(
            prompt_tokens=300,
            completion_tokens=64,
            cached_tokens=256,
            reasoning_tokens=48,
            accepted_tokens=40,
            rejected_tokens=5,
        ),
        timings=Timings(queued_s=0.25, prefill_s=1.5, decode_s=3.125),
        stop="</end>",
    ),
]
"""Messages of `FULL` before a model could run on several processes, and another plan continue its answers."""


def _without_experts(message: Message) -> Message:
    """Return a message of `FULL` without experts that are read from disk."""
    if not isinstance(message, Heartbeat) or message.resources is None:
        return message
    return replace(message, resources=replace(message.resources, experts=None))


BEFORE_EXPERTS: list[Message] = [
    _without_experts(message) for message in FULL if isinstance(message, Heartbeat)
]
"""Messages of `FULL` before experts could be read from disk."""


def _unadapted(message: Message) -> Message:
    """Return a message of `FULL` without its fields for adapters."""
    match message:
        case Generate():
            return replace(message, adapter="")
        case Ready():
            return replace(message, adapters=[], kv_quantization=None, max_kv_size=None)
    return message


_UNADAPTED = [_unadapted(message) for message in FULL]
BEFORE_ADAPTERS: list[Message] = [
    earlier for earlier, message in zip(_UNADAPTED, FULL, strict=True) if earlier != message
]
"""Messages of `FULL` before adapters."""


def _without_footprints(message: Message) -> Message:
    """Return a message of `FULL` without footprints."""
    message = _without_experts(message)
    if not isinstance(message, Heartbeat) or message.resources is None:
        return message
    ranks = [replace(rank, footprint_bytes=0) for rank in message.resources.ranks]
    return replace(message, resources=replace(message.resources, footprint_bytes=0, ranks=ranks))


BEFORE_FOOTPRINTS: list[Message] = [
    _without_footprints(message) for message in FULL if isinstance(message, Heartbeat)
]
"""Messages of `FULL` before processes reported their footprint."""

BEFORE_EXACTNESS: list[Message] = [
    replace(message, exactness=None) for message in _UNADAPTED if isinstance(message, Ready)
]
"""Messages of `FULL` before a worker measured whether its batched passes are exact."""

_UNMEASURED = [
    replace(message, exactness=None) if isinstance(message, Ready) else _without_footprints(message)
    for message in _UNADAPTED
]


def _unrelaxed(message: Message) -> Message:
    """Return a message of `FULL` without its fields for relaxed schemas."""
    match message:
        case Generate(form=StructuredOutput() as form):
            return replace(message, form=replace(form, strict=True))
        case Accepted():
            return replace(message, relaxed=[])
    return message


_UNRELAXED = [_unrelaxed(message) for message in _UNMEASURED]
BEFORE_RELAXING: list[Message] = [
    earlier for earlier, message in zip(_UNRELAXED, _UNMEASURED, strict=True) if earlier != message
]
"""Messages of `FULL` before schemas could be relaxed."""


def _unprepared(message: Message) -> Message:
    """Return a message of `FULL` without its fields for the preparation queue."""
    match message:
        case Generate():
            return replace(message, client="", media=[replace(media, pixels=0) for media in message.media])
        case Embed() | Rank():
            return replace(message, client="")
        case Ready():
            return replace(message, token_bytes_max=0, kv_quantization=None, max_kv_size=None)
        case Heartbeat():
            return replace(message, preparation=None)
    return message


_UNPREPARED = [_unprepared(message) for message in _UNRELAXED]
BEFORE_PREPARATION: list[Message] = [
    earlier for earlier, message in zip(_UNPREPARED, _UNRELAXED, strict=True) if earlier != message
]
"""Messages of `FULL` before the preparation queue."""


def _without_progress(beat: Heartbeat) -> Heartbeat:
    """Return the heartbeat without its progress fields."""
    assert beat.prefix is not None
    rows = [replace(row, work=0) for row in beat.rows]
    return replace(beat, rows=rows, prefix=replace(beat.prefix, read_timeouts=0), starved=0)


BEFORE_PROGRESS: list[Message] = [
    _without_progress(told) for told in _UNPREPARED if isinstance(told, Heartbeat)
]
"""Messages of `FULL` before the progress watchdog of single requests."""


BEFORE_NAMESPACES: list[Message] = [
    replace(told, namespace="") for told in FULL if isinstance(told, ClearCache | CacheCleared)
]
"""Messages of `FULL` before the namespaces of the prefix cache."""


def _of_one(beat: Heartbeat) -> Heartbeat:
    """Return the heartbeat without the memory of other ranks."""
    assert beat.resources is not None
    return replace(_without_progress(beat), resources=replace(beat.resources, ranks=[]))


BEFORE_RANKS: list[Message] = [_of_one(message) for message in _UNPREPARED if isinstance(message, Heartbeat)]
"""Messages of `FULL` before a worker reported the other ranks of its set."""


def _whole(message: Message) -> Message:
    """Return a message of `FULL` without its fields for sparse prefill."""
    match message:
        case Generate():
            return replace(message, sparse=None, left_out=[])
        case Heartbeat():
            message = _of_one(message)
            rows = [replace(row, reuse=REUSE if row.reuse else None) for row in message.rows]
            return replace(message, rows=rows)
        case PrefixHit():
            return replace(message, reuse=REUSE)
        case Finished(usage=usage):
            return replace(message, usage=replace(usage, sparse_tokens=0), continued_by="")
    return message


BEFORE_SPARSE: list[Message] = [whole for message in _UNPREPARED if (whole := _whole(message)) != message]
"""Messages of `FULL` before sparse prefill."""

BEFORE_SOURCES: list[Message] = [
    replace(told, drafts=SpecDecodeStatus(accepted=2**40, rejected=2**20))
    for told in map(_whole, _UNPREPARED)
    if isinstance(told, Heartbeat)
]
"""Messages of `FULL` before drafts were reported by drafter."""

BEFORE_FAILED_DEVICES: list[Message] = [Goodbye(incarnation=WORKER, reason="asked to stop")]
"""Messages of `FULL` before a worker told that its GPU had failed."""

BEFORE_ADOPTION: list[Message] = [
    Welcome(incarnation=GATEWAY, version=1),
    *(replace(told, rows=[]) for told in FULL if isinstance(told, Hello)),
]
"""Messages of `FULL` before a gateway adopted the rows of another one."""

BEFORE_KV_QUANTIZATION: list[Message] = [
    replace(told, kv_quantization=None, max_kv_size=None) for told in FULL if isinstance(told, Ready)
]
"""Messages of `FULL` before KV caches were quantized."""
BEFORE_KV_CAPS: list[Message] = [replace(told, max_kv_size=None) for told in FULL if isinstance(told, Ready)]
"""Messages of `FULL` before KV caches were capped."""

KINDS = {
    "full": FULL,
    "least": LEAST,
    "earlier": EARLIER,
    "before_reuse": BEFORE_REUSE,
    "before_resume": BEFORE_RESUME,
    "before_budgets": BEFORE_BUDGETS,
    "before_swaps": BEFORE_SWAPS,
    "before_channels": BEFORE_CHANNELS,
    "before_calls": BEFORE_CALLS,
    "before_counts": BEFORE_COUNTS,
    "before_texts": BEFORE_TEXTS,
    "before_videos": BEFORE_VIDEOS,
    "before_images": BEFORE_IMAGES,
    "before_resources": BEFORE_RESOURCES,
    "before_drafts": BEFORE_DRAFTS,
    "before_sources": BEFORE_SOURCES,
    "before_laps": BEFORE_LAPS,
    "before_replicas": BEFORE_REPLICAS,
    "before_plans": BEFORE_PLANS,
    "before_sparse": BEFORE_SPARSE,
    "before_ranks": BEFORE_RANKS,
    "before_preparation": BEFORE_PREPARATION,
    "before_failed_devices": BEFORE_FAILED_DEVICES,
    "before_footprints": BEFORE_FOOTPRINTS,
    "before_experts": BEFORE_EXPERTS,
    "before_relaxing": BEFORE_RELAXING,
    "before_progress": BEFORE_PROGRESS,
    "before_namespaces": BEFORE_NAMESPACES,
    "before_exactness": BEFORE_EXACTNESS,
    "before_adoption": BEFORE_ADOPTION,
    "before_adapters": BEFORE_ADAPTERS,
    "before_kv_quantization": BEFORE_KV_QUANTIZATION,
    "before_kv_caps": BEFORE_KV_CAPS,
}


def media_of(message: Message) -> list[bytes]:
    """Return the media frames that follow a sample."""
    return [IMAGE] * sum(media.frames for media in message.media) if isinstance(message, Generate) else []


def direction_of(message: Message) -> str:
    return next(name for name, union in UNIONS.items() if isinstance(message, get_args(union)))


def golden() -> dict[str, dict[str, str]]:
    """Return the golden frames: type name -> {"full": hex, "least": hex, …}."""
    read: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return read


def golden_frames() -> list[list[bytes]]:
    """Return every golden message as frames on the wire."""
    return [
        [bytes.fromhex(golden()[type(message).__name__][kind]), *media_of(message)]
        for kind, samples in KINDS.items()
        for message in samples
    ]


def main() -> None:
    written: dict[str, dict[str, str]] = {}
    for kind, samples in KINDS.items():
        for message in samples:
            body = wire.encode(message, media_of(message))[0]
            written.setdefault(type(message).__name__, {})[kind] = body.hex()
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
