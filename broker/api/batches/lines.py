"""Lines of a batch's file: parsed, checked, and written with their results. Pure.

OpenAI's lines have `custom_id`, `method`, `url` and `body`; Anthropic's requests are stored as lines with
`custom_id` and `params`. A body is opaque here: the route that it is sent to parses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from broker.api.batches.body import LINES_MAX, BatchRequest
from broker.api.batches.records import BatchRecord, Dialect, LineFault
from broker.dialects.body import encode, is_too_deep

FAULTS_MAX = 100
"""Maximum number of reported faults of a file."""
CUSTOM_ID_CHARS_MAX = 512
MESSAGES = "/v1/messages"


class OpenAiLine(Struct, frozen=True):
    """A line of OpenAI's format."""

    custom_id: str
    url: str
    body: Raw
    method: str | None = None


class _BodyHead(Struct, frozen=True):
    """What is read of a line's body before it runs."""

    model: Any = None
    stream: Any = None
    background: Any = None
    seed: Any = None


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch. `number`: from 1."""

    number: int
    custom_id: str
    body: bytes
    model: str | None = None


class LineError(ValueError):
    """Raised for a line that cannot run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


_openai = msgspec.json.Decoder(OpenAiLine)
_anthropic = msgspec.json.Decoder(BatchRequest)
_head = msgspec.json.Decoder(_BodyHead)


def read_line(raw: bytes, number: int, dialect: Dialect, endpoint: str) -> Line:
    """Parse and check a line. Raises `LineError`."""
    custom_id, body = _parts(raw, dialect, endpoint)
    if not custom_id or len(custom_id) > CUSTOM_ID_CHARS_MAX:
        message = f"custom_id must have 1 to {CUSTOM_ID_CHARS_MAX} characters."
        raise LineError("invalid_value", message, "custom_id")
    head = _read_head(body)
    where = "body" if dialect == "openai" else "params"
    if head.model is not None and not isinstance(head.model, str):
        raise LineError("invalid_type", "The model must be a string.", f"{where}.model")
    for name, value in (("stream", head.stream), ("background", head.background)):
        if value:
            raise LineError(
                "invalid_value", f"A batch's requests cannot have {name}: true.", f"{where}.{name}"
            )
    return Line(number, custom_id, body, head.model)


def _parts(raw: bytes, dialect: Dialect, endpoint: str) -> tuple[str, bytes]:
    if is_too_deep(raw):
        raise LineError("invalid_json_line", "This line is nested too deeply.")
    try:
        if dialect == "anthropic":
            request = _anthropic.decode(raw)
            return request.custom_id, bytes(request.params)
        line = _openai.decode(raw)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"This line is no request: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from None
    if line.method not in (None, "POST"):
        raise LineError("invalid_method", "The method must be POST.", "method")
    if line.url != endpoint:
        message = f"The url must be the endpoint of the batch, {endpoint}."
        raise LineError("invalid_url", message, "url")
    return line.custom_id, bytes(line.body)


def _read_head(body: bytes) -> _BodyHead:
    try:
        return _head.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_request", f"The body must be an object: {error}.", "body") from None


def with_seed(body: bytes, seed: int, endpoint: str) -> bytes:
    """Return the body with a seed, if it samples and its own is missing or negative: it can then run again
    with the same text."""
    named = _read_head(body).seed
    is_random = named is None or (isinstance(named, int | float) and named < 0)
    if endpoint == "/v1/embeddings" or not is_random:
        return body
    # At the end: of a key that occurs twice, as after `"seed": null`, the last value counts.
    rest = body.rstrip()[:-1].rstrip()
    return b'%s%s"seed":%d}' % (rest, b"" if rest.endswith(b"{") else b",", seed)


@dataclass(slots=True)
class FileCheck:
    """Validation of a file, line by line."""

    dialect: Dialect
    endpoint: str
    model: str | None = None
    faults: list[LineFault] = field(default_factory=list)
    total: int = 0
    _ids: set[str] = field(default_factory=set)

    def add(self, raw: bytes) -> None:
        """Check the next line; empty lines are ignored, and have no number."""
        try:
            line = read_line(raw, self.total + 1, self.dialect, self.endpoint)
            if line.custom_id in self._ids:
                message = f"The custom_id {line.custom_id[:64]!r} occurs more than once."
                raise LineError("duplicate_custom_id", message, "custom_id")
        except LineError as error:
            self.refuse(error.code, error.message, error.param)
            return
        self.total += 1
        self._ids.add(line.custom_id)
        self.model = self.model or line.model

    def refuse(self, code: str, message: str, param: str | None = None) -> None:
        """Count the next line as one that cannot run."""
        self.total += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(LineFault(code=code, message=message, line=self.total, param=param))

    def end(self) -> None:
        """Check the whole file."""
        if not self.total:
            self.faults.append(LineFault(code="empty_file", message="The file has no requests."))
        if self.total > LINES_MAX:
            message = f"The file has {self.total} requests, more than {LINES_MAX}."
            self.faults.insert(0, LineFault(code="too_many_requests", message=message))


# --- results -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The HTTP response to a line."""

    status: int
    request_id: str
    body: bytes

    @property
    def is_success(self) -> bool:
        return self.status == 200


def answered(batch: BatchRecord, line: Line, answer: LineAnswer) -> bytes:
    """Return the result line for an answer."""
    if batch.dialect == "anthropic":
        kind, name = ("succeeded", "message") if answer.is_success else ("errored", "error")
        return encode({"custom_id": line.custom_id, "result": {"type": kind, name: Raw(answer.body)}})
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": Raw(answer.body)}
    return _openai_result(batch, line, response, None)


def unanswered(batch: BatchRecord, line: Line) -> bytes | None:
    """Return the result line for a request that the batch ended without; None: it has none."""
    if batch.dialect == "anthropic":
        kind = "expired" if batch.ending == "expired" else "canceled"
        return encode({"custom_id": line.custom_id, "result": {"type": kind}})
    if batch.ending != "expired":
        return None
    message = "This request could not be executed before the completion window expired."
    return _openai_result(batch, line, None, {"code": "batch_expired", "message": message})


def _openai_result(
    batch: BatchRecord, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    id = f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"
    return encode({"id": id, "custom_id": line.custom_id, "response": response, "error": error})


class _Details(Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class TokenUsage(Struct, frozen=True):
    """Token usage of an answer, under the names of any dialect."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def of_line(self) -> tuple[int, int, int, int]:
        """Return input, cached, output and reasoning tokens."""
        nothing = _Details()
        read = self.cache_read_input_tokens or 0
        before = self.prompt_tokens_details or self.input_tokens_details or nothing
        after = self.completion_tokens_details or self.output_tokens_details or nothing
        return (
            self.prompt_tokens + self.input_tokens + read,
            before.cached_tokens + read,
            self.completion_tokens + self.output_tokens,
            after.reasoning_tokens,
        )


class _Answered(Struct, frozen=True):
    usage: TokenUsage | None = None


_usage = msgspec.json.Decoder(_Answered)


def usage_of(answer: LineAnswer) -> tuple[int, int, int, int]:
    """Return the tokens of an answer (see `TokenUsage.of_line`); zeros if it has no usage."""
    try:
        usage = _usage.decode(answer.body).usage
    except msgspec.DecodeError:
        usage = None
    return (usage or TokenUsage()).of_line()
