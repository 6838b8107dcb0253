"""Names by which users of vLLM and SGLang say how a model writes tool calls and reasoning."""

from __future__ import annotations

from typing import Literal, NamedTuple

CallParser = Literal[
    "command_a", "deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "ernie45",
    "functiongemma", "gemma4", "glm45", "glm47", "granite", "granite4", "hermes", "hunyuan_a13b", "jamba",
    "kimi_k2", "kimi_k3", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "minicpm5",
    "minimax", "minimax_m2", "minimax_m3", "mistral", "nemotron", "olmo3", "openai", "phi4_mini_json",
    "pythonic", "qwen", "qwen25", "qwen3_coder", "qwen3_xml", "seed_oss", "step3p5", "xlam",
]  # fmt: skip
ReasoningParser = Literal[
    "command_a", "deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "glm45", "granite", "holo2",
    "hunyuan_a13b", "kimi_k2", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral",
    "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "seed_oss", "step3", "step3p5",
]  # fmt: skip


class NamedParsers(NamedTuple):
    """The formats that an operator has named; None: recognized from the model."""

    calls: CallParser | None = None
    reasoning: ReasoningParser | None = None


RECOGNIZED = NamedParsers()
