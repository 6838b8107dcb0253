"""Forms with one file (multipart/form-data), read as they arrive: the file is passed on piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from protocol.errors import Code, RequestError

FIELDS_MAX = 16
FIELD_BYTES_MAX = 4096
HEADERS_BYTES_MAX = 4096
"""Maximum bytes of the headers of one part."""


@dataclass(slots=True)
class Form:
    """The fields of a form, and the name of its file; None if it has none. Complete when the file has been
    read to its end."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class FormReader:
    """Reader of a form whose file is the field `file_field`."""

    def __init__(self, request: Request, file_field: str) -> None:
        """Raises `RequestError` if the request has no form."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            message = "The content type must be multipart/form-data with a boundary."
            raise RequestError(Code.UNSUPPORTED_CONTENT_TYPE, message)
        self.form = Form()
        self._request = request
        self._file_field = file_field
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_name,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._header_name, self._header_value = b"", b""
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._pieces: list[bytes] = []
        self._is_file = self._is_whole = False

    async def file(self) -> AsyncIterator[bytes]:
        """Yield the file as it arrives. Afterwards, `form` is complete. Raises `RequestError`."""
        async for chunk in self._request.stream():
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _invalid(f"The form cannot be read: {error}.") from None
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
        if not self._is_whole:
            raise _invalid("The form ends before its last boundary.")

    # --- callbacks of the parser ---

    def _begin_part(self) -> None:
        self._header_name = self._header_value = self._disposition = b""
        self._value.clear()
        self._is_file = False

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name = self._bounded(self._header_name + data[start:end])

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value = self._bounded(self._header_value + data[start:end])

    def _bounded(self, header: bytes) -> bytes:
        if len(header) > HEADERS_BYTES_MAX:
            raise _invalid(f"A part of the form has a header of more than {HEADERS_BYTES_MAX} bytes.")
        return header

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name in self.form.fields or (
            self._name == self._file_field and self.form.filename is not None
        ):
            raise _invalid(f"The form has the field '{self._name[:64]}' more than once.")
        if self._name == self._file_field:
            self._is_file = True
            self.form.filename = options.get(b"filename", b"upload").decode(errors="replace")[:255]
        elif len(self.form.fields) >= FIELDS_MAX:
            raise _invalid(f"The form has more than {FIELDS_MAX} fields.")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES_MAX:
            raise _invalid(f"The field '{self._name[:64]}' has more than {FIELD_BYTES_MAX} bytes.")

    def _end_part(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._is_whole = True


def _invalid(message: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, message)
