"""Chat REPL: a conversation in the terminal until the user quits, its messages in the format of the API."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
from rich.console import Console

from deploy.console import answer, http
from protocol.common.error_text import closest_match
from protocol.common.model_folder import expand_user

# --- Parser of chat input: commands and messages. Pure, except for the check whether a file exists ---
#
# A line with only a triple quote begins a text that another one ends. Words that name image files add these
# images.

ReadLine = Callable[[str], str]
"""(prompt) -> the typed line. Raises `EOFError` at the end, or `KeyboardInterrupt`."""

QUOTE = '"""'
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")

Verb = Literal["help", "clear", "retry", "save", "system", "set", "image", "model", "thought", "exit"]
VERBS: tuple[Verb, ...] = get_args(Verb)
ALIASES: dict[str, Verb] = {"new": "clear", "again": "retry", "quit": "exit", "bye": "exit"}
"""Names of other programs, and earlier ones of this one."""
ARGUMENTS_REQUIRED = {"save": "FILE", "image": "FILE"}

PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority"),
    *("reasoning_effort", "enable_thinking", "thinking_budget", "speculation", "sparse_prefill"),
)
"""Names for /set. Servers ignore unknown names, so a misspelt one must be found here; values they check."""

HELP = """\
/clear            start a new conversation
/retry            generate the last answer again
/save FILE        save the conversation as Markdown, or as messages if FILE ends in .json
/system TEXT      set the system prompt; without TEXT, remove it
/set NAME VALUE   set a parameter, such as temperature or max_tokens; without VALUE, remove it
/set              show the parameters that are set
/image FILE       send an image with the next message; a message may also name files itself
/model NAME       continue with another model
/thought          show the reasoning of the last answer
/exit             or Ctrl-D

A line with only \"\"\" begins and ends a text of several lines.
Ctrl-C ends an answer early."""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command with its argument."""

    verb: Verb
    rest: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message to send to the model."""

    text: str
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the following requests. `value`: None to remove it."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class InvalidInput:
    """Invalid input, with the reason."""

    why: str


def read_input(read_line: ReadLine) -> str:
    """Read a line, or the lines between two triple quotes. Raises what `read_line` raises."""
    if (line := read_line(">>> ")).strip() != QUOTE:
        return line
    lines = []
    while (line := read_line("... ")).strip() != QUOTE:
        lines.append(line)
    return "\n".join(lines)


def is_there(path: Path) -> bool:
    """Return whether `path` is a file; False if that cannot be determined."""
    try:
        return path.is_file()
    except OSError:  # not a valid file name
        return False


def read(text: str, is_file: Callable[[Path], bool] = is_there) -> ChatCommand | ChatMessage | InvalidInput:
    """Parse a text. `is_file`: returns whether a file exists."""
    if not text.startswith("/") or is_file(Path(text.split()[0])):
        return ChatMessage(text, tuple(_images(text, is_file)))
    word, _, rest = text[1:].partition(" ")
    for verb in VERBS:
        if verb == ALIASES.get(word, word):
            if verb in ARGUMENTS_REQUIRED and not rest.strip():
                return InvalidInput(f"write /{verb} {ARGUMENTS_REQUIRED[verb]}")
            return ChatCommand(verb, rest.strip())
    return InvalidInput(f"unknown command /{word}; /help lists commands")


def read_parameter(text: str) -> Parameter | InvalidInput:
    """Parse the argument of /set. A value is JSON, or else a string."""
    name, _, value = text.partition(" ")
    if name not in PARAMETERS:
        hint = closest_match(name, PARAMETERS) or f"; known parameters: {', '.join(PARAMETERS)}"
        return InvalidInput(f"unknown parameter {name}{hint}")
    try:
        return Parameter(name, json.loads(value) if value.strip() else None)
    except (ValueError, RecursionError):
        return Parameter(name, value.strip())


def _images(text: str, is_file: Callable[[Path], bool]) -> list[Path]:
    try:
        words = shlex.split(text)
    except ValueError:  # an unmatched apostrophe, for example
        words = text.split()
    named = [expand_user(Path(word)) for word in words if word.lower().endswith(IMAGE_SUFFIXES)]
    return [path for path in named if is_file(path)]


HISTORY_LINES_MAX = 1000

IMAGE_BYTES_MAX = 16 * 2**20

Message = dict[str, Any]


class ImageError(ValueError):
    """A file that cannot be sent as an image; the message says why."""


@dataclass(slots=True)
class Conversation:
    """A conversation. `messages`: all except the system prompt. An unanswered user message is the last."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, images: Sequence[str] = ()) -> None:
        """Add a user message with images as data URLs. It replaces an unanswered one."""
        if self.is_open:
            self.messages.pop()
        if not images:
            self.messages.append({"role": "user", "content": text})
            return
        parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        self.messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})

    def answered(self, text: str) -> None:
        """Add the answer, or the part of it that was received."""
        self.messages.append({"role": "assistant", "content": text})

    @property
    def is_open(self) -> bool:
        """Whether the last message is an unanswered one of the user."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def take_back(self) -> bool:
        """Remove the last answer, to generate it again. Return whether a message is unanswered."""
        if self.messages and not self.is_open:
            self.messages.pop()
        return self.is_open

    def forget(self) -> None:
        """Start a new conversation with the same system prompt."""
        self.messages.clear()

    def request_messages(self) -> list[Message]:
        """Return the messages of a request."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def transcript(self) -> str:
        """Return the conversation as Markdown."""
        return "\n".join(f"## {each['role'].title()}\n\n{_text(each)}\n" for each in self.request_messages())


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content.strip()
    return "\n\n".join(part["text"].strip() if part["type"] == "text" else "[image]" for part in content)


def read_image(path: Path) -> str:
    """Return an image file as a data URL. Raises `ImageError`."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise ImageError(f"{path} does not have the suffix of an image file")
    try:
        data = expand_user(path).read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > IMAGE_BYTES_MAX:
        raise ImageError(f"{path} is too large: {len(data)} bytes, the maximum is {IMAGE_BYTES_MAX}")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@dataclass(slots=True)
class ChatRepl:
    """A chat session. `fields`: further fields of each request. `images`: data URLs for the next message."""

    client: httpx.Client
    console: Console
    model: str
    conversation: Conversation = field(default_factory=Conversation)
    fields: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    thought: str = ""

    def run(self, read_line: ReadLine) -> None:
        """Run until the end of input or /exit."""
        while True:
            try:
                text = read_input(read_line)
                if text.strip() and not self._ask(text):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print()

    def say(self, text: str, images: Sequence[Path] = (), *, draw: bool) -> answer.Answer:
        """Send a message and print its answer. Raises `ConsoleError` or `ImageError`."""
        urls = [*self.images, *map(read_image, images)]
        self.conversation.ask(text, urls)
        self.images.clear()
        return self._answer(draw=draw)

    def _answer(self, *, draw: bool) -> answer.Answer:
        body = {"model": self.model, "messages": self.conversation.request_messages(), **self.fields}
        pieces = http.stream(self.client, body)
        with contextlib.closing(pieces):
            found = (answer.drawn if draw else answer.plain)(self.console, pieces)
        if found.text or not found.stopped:
            self.conversation.answered(found.text)
        self.thought = found.thought
        return found

    def _ask(self, text: str) -> bool:
        """Handle a text; return False on /exit."""
        with self._request_errors():
            match read(text):
                case ChatMessage(words, images):
                    self.say(words, images, draw=True)
                case InvalidInput(why):
                    self.console.print(why, style="yellow", markup=False)
                case ChatCommand("exit"):
                    return False
                case ChatCommand() as order:
                    self._run_command(order)
        return True

    @contextlib.contextmanager
    def _request_errors(self) -> Iterator[None]:
        """Print an error instead of ending the session."""
        try:
            yield
        except (http.ConsoleError, ImageError) as error:
            self.console.print(str(error), style="red", markup=False)
            if self.conversation.is_open:
                self._note("/retry sends it again")

    def _run_command(self, order: ChatCommand) -> None:
        match order.verb:
            case "clear":
                self.conversation.forget()
                self.images.clear()
                self._note("new conversation")
            case "retry" if self.conversation.take_back():
                self._answer(draw=True)
            case "retry":
                self.console.print("there is no question to send again", style="yellow")
            case "save":
                self._save(expand_user(Path(order.rest)))
            case "system":
                self.conversation.system = order.rest
                self._note("system prompt set" if order.rest else "no system prompt")
            case "set":
                self._set(order.rest)
            case "image":
                self.images.append(read_image(Path(order.rest)))
                self._note("the next message has this image")
            case "model":
                self.model = order.rest or self.model
                self._note(self.model)
            case "thought":
                self._note(self.thought or "no reasoning")
            case _:
                self._note(HELP)

    def _set(self, text: str) -> None:
        given = read_parameter(text) if text else None
        if isinstance(given, InvalidInput):
            self.console.print(given.why, style="yellow", markup=False)
            return
        if given is not None:
            self.fields[given.name] = given.value
            if given.value is None:
                del self.fields[given.name]
        values = [f"{name} = {json.dumps(value)}" for name, value in self.fields.items()]
        self._note("\n".join(values) or "no parameters are set")

    def _save(self, path: Path) -> None:
        """Write the conversation to a new file."""
        is_json = path.suffix == ".json"
        document = json.dumps(self.conversation.request_messages(), ensure_ascii=False, indent=1) + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(document if is_json else self.conversation.transcript())
        except OSError as error:
            self.console.print(f"{path}: {error.strerror}", style="red", markup=False)
        else:
            self._note(f"saved in {path}")

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


@contextlib.contextmanager
def lines_with_history(path: Path | None) -> Iterator[ReadLine]:
    """Provide a line editor with history. `path`: a file that only its owner can read; None: no history."""
    import readline

    readline.set_history_length(HISTORY_LINES_MAX)
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield input
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                path.chmod(0o600)
                readline.write_history_file(path)
