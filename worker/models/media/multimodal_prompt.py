"""Multimodal prompts: text prompts with expanded image placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from worker.models.media.parts import Kind, kinds_in, with_images_behind
from worker.models.media.preprocessing import ImagePreprocessor, ProcessedImage
from worker.models.prompts.boundaries import Messages
from worker.models.prompts.grammar_choice import GrammarCache
from worker.models.prompts.prompt import PromptRules, TextPreparer, TokenizedPrompt


class MultimodalPreparer(TextPreparer):
    """`contract.Preparer` for vision models."""

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
            return super()._lay(request, (), conversation, special=special, opens_turn=opens_turn)
        source = request.source or "messages"
        looked = self._looked(kinds, request, media)
        messages, text = self._shown(conversation, messages, looked, source, opens_turn=opens_turn)
        tokens = self._encode(text, source, special=special)
        images = self._image_processor.place(tokens, looked)
        if images is None:
            raise _literal(source, "the tokens that represent an image in this model's prompts")

        def expand(rendered: str) -> str:
            return self._image_processor.expand(rendered, looked) or ""

        return TokenizedPrompt(source, text, tokens, messages, expand, tuple(images))

    def _looked(
        self, kinds: Sequence[Kind], request: Generate, frames: Sequence[bytes]
    ) -> list[ProcessedImage]:
        own = [frames[each.frame : each.frame + each.frames] for each in request.media]
        preprocess = partial(self._image_processor.preprocess, salt=request.cache_salt)
        return [
            preprocess(kind, each, files, self._plain, self._added)
            for kind, each, files in zip(kinds, request.media, own, strict=True)
        ]

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, "messages", special=False)

    def _shown(
        self,
        conversation: Conversation,
        messages: Messages,
        looked: Sequence[ProcessedImage],
        source: str,
        *,
        opens_turn: bool,
    ) -> tuple[Messages, str]:
        """Return the messages and their text with all images expanded. Where a template renders no images in
        tool results or answers, they are moved to a user message after these."""
        if (mark := self._image_processor.literal(messages)) is not None:
            raise _literal(source, repr(mark))
        for shown in (messages, with_images_behind(messages)):
            rendered = self._rendered(conversation, shown, opens_turn=opens_turn)
            if self._image_processor.count(rendered) == len(looked):
                break
        text = self._image_processor.expand(rendered, looked)
        if text is None:
            message = "The model's chat template renders no images where these messages have them."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=source)
        return shown, text


def _literal(source: str, what: str) -> RequestError:
    message = f"The {source} must not contain {what} as text beside images."
    return RequestError(Code.INVALID_REQUEST, message, param=source)
