"""Bodies about models and adapters: our own, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from broker.dialects.body import decode, wrong
from protocol.adapters import is_adapter_name

FOLDER_CHARACTERS_MAX = 4096


class ModelChoice(Struct, kw_only=True):
    """`model`: name or alias. `stream`: report each change as an event, until the order is carried out."""

    model: str
    stream: bool | None = None


class AdapterFolder(Struct, kw_only=True):
    """An adapter to load. `folder`: absolute, on the machine of the workers. `model`: name or alias; the
    only or first model if absent."""

    name: str
    folder: str
    model: str | None = None


class LoraFolder(Struct, kw_only=True):
    """vLLM's body. `base_model_name` is the model; other fields are ignored."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class LoraName(Struct, kw_only=True):
    """vLLM's body. `base_model_name` is the model; other fields are ignored."""

    lora_name: str
    base_model_name: str | None = None


_choice_decoder = msgspec.json.Decoder(ModelChoice)
_folder_decoder = msgspec.json.Decoder(AdapterFolder)
_lora_decoder = msgspec.json.Decoder(LoraFolder)
_name_decoder = msgspec.json.Decoder(LoraName)


def read_choice(raw: bytes) -> ModelChoice:
    """Decode a body of /v1/models/load and its like. Raises `RequestError` naming the parameter at fault."""
    return decode(_choice_decoder, raw)


def read_folder(raw: bytes) -> AdapterFolder:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_folder_decoder, raw)
    _check(body.name, "name", body.folder, "folder")
    return body


def read_lora_folder(raw: bytes) -> AdapterFolder:
    """Decode and check vLLM's body to load an adapter. Raises `RequestError` naming the parameter at
    fault."""
    body = decode(_lora_decoder, raw)
    _check(body.lora_name, "lora_name", body.lora_path, "lora_path")
    return AdapterFolder(name=body.lora_name, folder=body.lora_path, model=body.base_model_name)


def read_lora_name(raw: bytes) -> LoraName:
    """Decode vLLM's body to remove an adapter. Raises `RequestError` naming the parameter at fault."""
    return decode(_name_decoder, raw)


def _check(name: str, name_param: str, folder: str, folder_param: str) -> None:
    if not is_adapter_name(name):
        raise wrong(name_param, "must have 1 to 100 letters, digits and _.@+- in it")
    if not folder.startswith("/") or "\0" in folder or len(folder) > FOLDER_CHARACTERS_MAX:
        raise wrong(folder_param, f"must be an absolute path of at most {FOLDER_CHARACTERS_MAX} characters")
