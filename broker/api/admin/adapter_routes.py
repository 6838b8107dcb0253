"""GET and POST /v1/adapters, DELETE /v1/adapters/NAME; vLLM's /v1/load_lora_adapter and
/v1/unload_lora_adapter. Folders of the server are never shown."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from broker.api.admin import body as bodies
from broker.dispatch.adapters import AdapterLoad
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import unknown_model
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.state import gateway_of
from protocol.errors import Code, RequestError
from protocol.types import AdapterInfo

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16_384
LOAD_WAIT_S_MAX = 120.0
"""Longest wait for the workers to load an adapter."""


async def list_adapters(request: Request) -> Response:
    """List the adapters of all models that requests may use."""
    dispatcher = gateway_of(request).dispatcher
    found = {model: dispatcher.adapters.known(model) for model in sorted(dispatcher.fleet.models)}
    listed = [_shown(model, info) for model, infos in found.items() for info in infos]
    return JsonResponse({"object": "list", "data": listed})


async def add(request: Request) -> Response:
    """Have an adapter loaded by all workers of its model; return when they have."""
    body = bodies.read_folder(await read_body(request, BODY_BYTES_MAX))
    model, info = await _load(gateway_of(request).dispatcher, body, "folder")
    return JsonResponse(_shown(model, info))


async def remove(request: Request) -> Response:
    """Remove an adapter; requests that use it finish."""
    dispatcher, name = gateway_of(request).dispatcher, request.path_params["name"]
    model = _model_of(dispatcher, request.query_params.get("model"))
    users = _remove(dispatcher, model, name)
    return JsonResponse({"object": "adapter.removed", "model": model, "name": name, "requests": users})


async def load_lora(request: Request) -> Response:
    """Have an adapter loaded, as vLLM's endpoint does."""
    body = bodies.read_lora_folder(await read_body(request, BODY_BYTES_MAX))
    await _load(gateway_of(request).dispatcher, body, "lora_path")
    return PlainTextResponse(f"Success: LoRA adapter '{body.name}' added successfully.")


async def unload_lora(request: Request) -> Response:
    """Remove an adapter, as vLLM's endpoint does."""
    body = bodies.read_lora_name(await read_body(request, BODY_BYTES_MAX))
    dispatcher = gateway_of(request).dispatcher
    _remove(dispatcher, _model_of(dispatcher, body.base_model_name), body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _model_of(dispatcher: Dispatcher, asked: str | None) -> str:
    """Return the name of the model that is asked for; None: the only or first one. Raises `RequestError`."""
    catalogue, models = dispatcher.catalogue, dispatcher.fleet.models
    default = catalogue.default_model("generate") if catalogue.on_demand else None
    name = catalogue.resolve(asked) if asked else default
    if name is None and len(models) == 1:
        return next(iter(models))
    if name is None:
        message = "'model' is required: this server has several models, or none yet."
        raise RequestError(Code.INVALID_REQUEST, message, param="model")
    if name not in models:
        raise unknown_model(name, models)
    return name


async def _load(dispatcher: Dispatcher, body: bodies.AdapterFolder, param: str) -> tuple[str, AdapterInfo]:
    """Return the model and its new adapter. Raises `RequestError`."""
    model, over = _model_of(dispatcher, body.model), asyncio.Event()
    with dispatcher.adapters.load(model, body.name, body.folder) as order:
        order.on_over = over.set
        try:
            async with asyncio.timeout(LOAD_WAIT_S_MAX):
                await over.wait()
        except TimeoutError:
            message = f"The adapter `{body.name}` was not loaded within {LOAD_WAIT_S_MAX:g} s."
            raise RequestError(Code.DEADLINE_EXCEEDED, message) from None
        info = _loaded(order, param)
        log.info("adapter %s of %s is loaded: rank %d, %d bytes", info.name, model, info.rank, info.bytes)
        return model, info


def _remove(dispatcher: Dispatcher, model: str, name: str) -> int:
    """Remove an adapter; return the number of requests that still use it. Raises `RequestError`."""
    users = dispatcher.adapters.remove(model, name)
    log.info("adapter %s of %s is removed", name, model)
    return users


def _loaded(order: AdapterLoad, param: str) -> AdapterInfo:
    if order.error or order.info is None:
        why = order.error or "its workers were lost"
        message = f"The adapter `{order.name}` cannot be served: {why}."
        raise RequestError(Code.INVALID_REQUEST, message, param=param)
    return order.info


def _shown(model: str, info: AdapterInfo) -> dict[str, object]:
    own = {"name": info.name, "rank": info.rank, "bytes": info.bytes, "digest": info.digest}
    return {"object": "adapter", "id": f"{model}:{info.name}", "model": model, **own}


ROUTES = [
    Route("/v1/adapters", list_adapters),
    Route("/v1/adapters", add, methods=["POST"]),
    Route("/v1/adapters/{name}", remove, methods=["DELETE"]),
    Route("/v1/load_lora_adapter", load_lora, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora, methods=["POST"]),
]
