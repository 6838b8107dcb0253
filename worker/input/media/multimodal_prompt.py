"""Multimodal prompts: text prompts with expanded image placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from worker.input.media.images import PixelBudget
from worker.input.media.preprocessing import (
    ImagePreprocessor,
    Kind,
    ProcessedImage,
    kinds_in,
    with_images_behind,
)
from worker.input.prompts.boundaries import Messages
from worker.input.prompts.completion import check_text
from worker.input.prompts.grammar_choice import GrammarCache
from worker.input.prompts.prompt import PromptRules, TextPreparer, TokenizedPrompt
from worker.input.prompts.token_limit import TokenLimit


class MultimodalPreparer(TextPreparer):
    """`Preparer` for vision models."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        rules: PromptRules,
        image_preprocessor: ImagePreprocessor,
        grammar_cache: GrammarCache | None = None,
    ) -> None:
        """`tokenizer`: used by no other thread. `image_preprocessor`, `grammar_cache`: shared by the model's
        preparers."""
        super().__init__(tokenizer, rules, grammar_cache)
        self._image_processor = image_preprocessor
        if self._render is not None:
            self._render = image_preprocessor.template(self._render)

    def _lay(
        self,
        request: Generate,
        media: Sequence[bytes],
        conversation: Conversation,
        limit: TokenLimit,
        *,
        special: bool = False,
        opens_turn: bool = True,
    ) -> TokenizedPrompt:
        messages = conversation.messages
        kinds = [] if messages is None else kinds_in(messages)
        if len(kinds) != len(request.media):
            message = f"The request has {len(request.media)} images, but the messages refer to {len(kinds)}."
            raise RequestError(Code.INVALID_MEDIA, message, param=request.source or "messages")
        if messages is None or not kinds:
            return super()._lay(request, (), conversation, limit, special=special, opens_turn=opens_turn)
        source = request.source or "messages"
        for kind, each in zip(kinds, request.media, strict=True):
            self._image_processor.check_kind(kind, each)
        # The text may be too long, so it is rendered and counted before any image is decoded.
        messages, rendered = self._shown(conversation, messages, len(kinds), source, opens_turn=opens_turn)
        check_text(self._tokenizer, rendered, source, limit)
        looked = self._looked(kinds, request, media, source, limit)
        text = self._image_processor.expand(rendered, looked)
        if text is None:
            raise _unplaced(source)
        tokens = self._encode(text, source, limit, special=special)
        images = self._image_processor.place(tokens, looked)
        if images is None:
            raise _literal(source, "the tokens that represent an image in this model's prompts")

        def expand(rendered: str) -> str:
            return self._image_processor.expand(rendered, looked) or ""

        return TokenizedPrompt(source, text, tokens, messages, expand, tuple(images))

    def _looked(
        self,
        kinds: Sequence[Kind],
        request: Generate,
        frames: Sequence[bytes],
        source: str,
        limit: TokenLimit,
    ) -> list[ProcessedImage]:
        """Preprocess images one after another. Raises `RequestError` for too many tokens or pixels."""

        def encode(text: str) -> list[int]:
            return self._encode(text, source, limit, special=False)

        looked: list[ProcessedImage] = []
        count = 0
        preprocess = partial(
            self._image_processor.preprocess,
            encode=encode,
            added=self._added,
            cancel_token=limit.cancel_token,
            salt=request.cache_salt,
            budget=PixelBudget(),
        )
        for kind, each in zip(kinds, request.media, strict=True):
            looked.append(preprocess(kind, each, frames[each.frame : each.frame + each.frames]))
            count += len(looked[-1].tokens)
            limit.check(count, source)
        return looked

    def _shown(
        self,
        conversation: Conversation,
        messages: Messages,
        images: int,
        source: str,
        *,
        opens_turn: bool,
    ) -> tuple[Messages, str]:
        """Return the messages and their text with a placeholder for each image. Where a template renders no
        images in tool results or answers, they are moved to a user message after these."""
        if (mark := self._image_processor.literal(messages)) is not None:
            raise _literal(source, repr(mark))
        for shown in (messages, with_images_behind(messages)):
            rendered = self._rendered(conversation, shown, opens_turn=opens_turn)
            if self._image_processor.count(rendered) == images:
                break
        if self._image_processor.count(rendered) < images:
            raise _unplaced(source)
        return shown, rendered


def _unplaced(source: str) -> RequestError:
    message = "The model's chat template renders no images where these messages have them."
    return RequestError(Code.UNSUPPORTED_MEDIA, message, param=source)


def _literal(source: str, what: str) -> RequestError:
    message = f"The {source} must not contain {what} as text beside images."
    return RequestError(Code.INVALID_REQUEST, message, param=source)
