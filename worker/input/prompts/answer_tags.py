"""Tags around the content of an answer: plain text, which some families write behind a thought.

Other models write such tags because they were asked to: they are content unless the chat template has them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.input.prompts.template import Template, attempt, template_of
from worker.input.prompts.wants import ANSWER, USER

_KNOWN = (
    ("<answer>", "</answer>"),  # Hunyuan
    ("<response>", "</response>"),  # Granite 3.3, ERNIE
)


def answer_tags_of(tokenizer: TokenizerWrapper) -> Iterator[str]:
    """Yield the tags that the chat template knows."""
    text = str(getattr(tokenizer, "chat_template", None) or "")
    for start, end in _KNOWN:
        template = template_of(tokenizer) if start in text else None
        if template is not None and _knows(template, start, end):
            yield from (start, end)


def _knows(template: Template, start: str, end: str) -> bool:
    """Return whether a template writes the tags around answers, asks for them, or cuts them off. It may have
    them for other things, such as results of tools (MiniMax)."""
    thinking = {"enable_thinking": True, "thinking": True}
    tagged = attempt(template, [USER, ANSWER | {"content": f"{start}{ANSWER['content']}{end}"}])
    is_cut = ANSWER["content"] in tagged and start not in tagged
    return is_cut or start in attempt(template, [USER, ANSWER], options=thinking)
