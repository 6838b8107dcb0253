"""Prompts with images: as those of text, and every image in its place."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Media
from worker.models.boundaries import Messages
from worker.models.eyes import Eyes, Looked
from worker.models.holding import Held
from worker.models.parts import Kind, kinds_in, with_images_behind
from worker.models.prompt import Laid, PromptRules, TextPreparer


class SeeingPreparer(TextPreparer):
    """`contract.Preparer` for models that see."""

    def __init__(
        self, tokenizer: TokenizerWrapper, rules: PromptRules, eyes: Eyes, held: Held | None = None
    ) -> None:
        """`tokenizer`: used by no other thread. `eyes`, `held`: shared by the preparers of one model."""
        super().__init__(tokenizer, rules, held)
        self._eyes = eyes
        if self._render is not None:
            self._render = eyes.template(self._render)

    def _lay(
        self,
        request: Generate,
        media: Sequence[bytes],
        conversation: Conversation,
        *,
        special: bool = False,
        opens_turn: bool = True,
    ) -> Laid:
        messages = conversation.messages
        kinds = [] if messages is None else kinds_in(messages)
        if len(kinds) != len(request.media):
            message = f"There are {len(request.media)} images for {len(kinds)} places in the messages."
            raise RequestError(Code.INVALID_MEDIA, message, param=request.source or "messages")
        if messages is None or not kinds:
            return super()._lay(request, (), conversation, special=special, opens_turn=opens_turn)
        source = request.source or "messages"
        looked = self._looked(kinds, request.media, media)
        messages, text = self._shown(conversation, messages, looked, source, opens_turn=opens_turn)
        tokens = self._encode(text, source, special=special)
        pictures = self._eyes.place(tokens, looked)
        if pictures is None:
            raise _literal(source, "what stands for an image in this model's prompts")

        def expand(rendered: str) -> str:
            return self._eyes.expand(rendered, looked) or ""

        return Laid(source, text, tokens, messages, expand, tuple(pictures))

    def _looked(self, kinds: Sequence[Kind], media: Sequence[Media], frames: Sequence[bytes]) -> list[Looked]:
        own = [frames[each.frame : each.frame + each.frames] for each in media]
        return [
            self._eyes.look(kind, each, files, self._plain, self._added)
            for kind, each, files in zip(kinds, media, own, strict=True)
        ]

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, "messages", special=False)

    def _shown(
        self,
        conversation: Conversation,
        messages: Messages,
        looked: Sequence[Looked],
        source: str,
        *,
        opens_turn: bool,
    ) -> tuple[Messages, str]:
        """The messages and their text with every image in it. Where a template shows no images in a tool's
        result or in an answer, they are shown as a user's, behind it."""
        if (mark := self._eyes.literal(messages)) is not None:
            raise _literal(source, repr(mark))
        for shown in (messages, with_images_behind(messages)):
            rendered = self._rendered(conversation, shown, opens_turn=opens_turn)
            if self._eyes.count(rendered) == len(looked):
                break
        text = self._eyes.expand(rendered, looked)
        if text is None:
            message = "The model's chat template shows no images where these messages have them."
            raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=source)
        return shown, text


def _literal(source: str, what: str) -> RequestError:
    message = f"The {source} must not contain {what} as text beside images."
    return RequestError(Code.INVALID_REQUEST, message, param=source)
