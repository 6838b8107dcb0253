"""Client tools whose schema Anthropic defines: a type such as `bash_20250124` stands for it.

They are offered as functions with the documented input, and their calls are plain `tool_use` blocks. Later
versions of a tool than those known here get the latest schema. Toolsets are not offered.
"""

from __future__ import annotations

import re
from typing import Any

from broker.api.messages.content import Tool
from broker.dialects.tools import FunctionTool

_DATED = re.compile(r"(bash|computer|memory|text_editor)_(\d{8})")
_EDITS = ("view", "create", "str_replace", "insert")
_ACTIONS = {
    "20241022": (
        "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
        "double_click", "screenshot", "cursor_position",
    ),
    "20250124": ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait"),
}  # fmt: skip
"""Actions of the computer, by the version that adds them."""


def function_of(tool: Tool) -> FunctionTool | None:
    """Return the function that is offered for a tool; None for one that runs at Anthropic's servers."""
    if tool.type in (None, "custom"):
        return FunctionTool(tool.name or "", tool.description, tool.input_schema, tool.strict)
    if (found := _DATED.fullmatch(tool.type)) is None:
        return None
    kind, date = found.groups()
    match kind:
        case "bash":
            described, fields, required = _BASH, _BASH_FIELDS, []
        case "computer":
            described, fields, required = _computer(tool), _computer_fields(tool, date), ["action"]
        case "memory":
            described, required = _MEMORY, ["command"]
            fields = _choice("command", *_EDITS, "delete", "rename") | _FILE_FIELDS | _MEMORY_FIELDS
        case _:
            described, required = _EDITOR, ["command", "path"]
            fields = _editor_fields(is_old=date < "20250429")
    schema = {"type": "object", "properties": fields, "required": required}
    return FunctionTool(tool.name or "", described, schema, tool.strict)


Fields = dict[str, dict[str, Any]]


def _field(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


def _integers(count: int, description: str) -> dict[str, Any]:
    items = {"items": {"type": "integer"}, "minItems": count, "maxItems": count}
    return _field("array", description) | items


def _choice(name: str, *values: str) -> Fields:
    return {name: _field("string", f"The {name} to run.") | {"enum": [*values]}}


_BASH = "Run commands in a bash shell that keeps its state between calls."
_BASH_FIELDS: Fields = {
    "command": _field("string", "The command to run. Required unless the shell is restarted."),
    "restart": _field("boolean", "Whether to restart the shell instead."),
}
_EDITOR = "View, create and edit files."
_FILE_FIELDS: Fields = {
    "path": _field("string", "Absolute path of the file or directory."),
    "view_range": _integers(2, "For view: first and last line, from 1; -1 is the end of the file."),
    "file_text": _field("string", "For create: the content of the file."),
    "old_str": _field("string", "For str_replace: the text to replace, which must occur exactly once."),
    "new_str": _field("string", "For str_replace: the text to put in its place."),
    "insert_line": _field("integer", "For insert: the line after which to insert; 0 is the beginning."),
    "insert_text": _field("string", "For insert: the text to insert."),
}
_MEMORY = (
    "Files in /memories, which outlive this conversation. View the directory before anything else, and "
    "write down what later conversations need."
)
_MEMORY_FIELDS: Fields = {
    "old_path": _field("string", "For rename: the path so far."),
    "new_path": _field("string", "For rename: the new path."),
}
_COMPUTER_FIELDS: Fields = {
    "coordinate": _integers(2, "Pixels from the left and from the top, where the action happens or ends."),
    "text": _field("string", "For type: the text. For key and hold_key: the keys. For clicks: keys to hold."),
}
_LATER_COMPUTER_FIELDS: Fields = {
    "start_coordinate": _integers(2, "For left_click_drag: where it begins."),
    "scroll_direction": _field("string", "For scroll.") | {"enum": ["up", "down", "left", "right"]},
    "scroll_amount": _field("integer", "For scroll: the number of steps."),
    "duration": _field("number", "For hold_key and wait: seconds."),
}


def _editor_fields(*, is_old: bool) -> Fields:
    """Return the fields of a text editor. The old ones undo edits, and insert `new_str`."""
    if not is_old:
        return _choice("command", *_EDITS) | _FILE_FIELDS
    fields = {name: field for name, field in _FILE_FIELDS.items() if name != "insert_text"}
    fields["new_str"] = _field("string", "For str_replace: the new text. For insert: the text to insert.")
    return _choice("command", *_EDITS, "undo_edit") | fields


def _computer(tool: Tool) -> str:
    size = f" of {tool.display_width_px} x {tool.display_height_px} pixels" if tool.display_width_px else ""
    return f"Use a computer by mouse, keyboard and screenshots of its display{size}."


def _computer_fields(tool: Tool, date: str) -> Fields:
    actions = [action for since, added in _ACTIONS.items() if since <= date for action in added]
    fields = _COMPUTER_FIELDS | (_LATER_COMPUTER_FIELDS if date > "20241022" else {})
    if tool.enable_zoom:
        actions.append("zoom")
        fields |= {"region": _integers(4, "For zoom: left, top, right and bottom edge in pixels.")}
    return _choice("action", *actions) | fields
