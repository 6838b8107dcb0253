"""GET /v1/models[/ID] in OpenAI's format, or in Anthropic's if the request has an `anthropic-version`
header. POST /v1/models/load and /unload: load or unload a model that is loaded on demand."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.dialects.model_choice import read_choice
from broker.dispatch.fleet import ModelEntry
from broker.http.respond import read_body
from broker.routes.state import GatewayState, gateway_of
from protocol.errors import Code, RequestError
from protocol.tasks import tasks

CHOICE_BYTES_MAX = 4096


async def list_models(request: Request) -> Response:
    """List every model that is configured or that a worker has announced, loaded or not."""
    gateway = gateway_of(request)
    names = sorted(gateway.dispatcher.fleet.models)
    if _is_anthropics(request):
        listed = [_anthropics(gateway, name) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JSONResponse({"data": listed, "has_more": False, **ends})
    listed = [_model_object(gateway, name) for name in names]
    # Codex fails without `models`. It is empty: an entry would have to replace the agent's own prompt.
    for_codex: dict[str, object] = {"models": []} if "client_version" in request.query_params else {}
    return JSONResponse({"object": "list", "data": listed, **for_codex})


async def get_model(request: Request) -> Response:
    """Return one model, by id or alias; ids may contain slashes."""
    gateway = gateway_of(request)
    name = gateway.dispatcher.catalogue.resolve(request.path_params["model"]) or ""
    if name not in gateway.dispatcher.fleet.models:
        raise RequestError(Code.MODEL_NOT_FOUND, f"The model `{name}` does not exist here.", param="model")
    return JSONResponse((_anthropics if _is_anthropics(request) else _model_object)(gateway, name))


async def load(request: Request) -> Response:
    """Have a model loaded; return it without waiting, in the state that it is in now."""
    gateway = gateway_of(request)
    return JSONResponse(_model_object(gateway, gateway.dispatcher.catalogue.load(await _named(request))))


async def unload(request: Request) -> Response:
    """Have an idle model unloaded; return it without waiting, in the state that it is in now."""
    gateway = gateway_of(request)
    return JSONResponse(_model_object(gateway, gateway.dispatcher.catalogue.unload(await _named(request))))


async def _named(request: Request) -> str:
    return read_choice(await read_body(request, CHOICE_BYTES_MAX)).model


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _created(known: ModelEntry) -> int:
    """Return the Unix time at which the model was first seen."""
    return int(time.time() - (time.monotonic() - known.first_seen_at))


def _anthropics(gateway: GatewayState, name: str) -> dict[str, object]:
    known = gateway.dispatcher.fleet.models[name]
    created_at = datetime.fromtimestamp(_created(known), UTC).isoformat().replace("+00:00", "Z")
    model = {"type": "model", "id": name, "display_name": name, "created_at": created_at}
    return {**model, "lifecycle": "active", "max_input_tokens": known.context_length or None}


def _model_object(gateway: GatewayState, name: str) -> dict[str, object]:
    known = gateway.dispatcher.fleet.models[name]
    catalogue = gateway.dispatcher.catalogue
    created = _created(known)
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "roundhouse"}
    if known.context_length:
        model["context_length"] = known.context_length
    if known.last is not None:
        model["tasks"] = tasks(known.last.capabilities)
    model["state"] = catalogue.state(name)
    if name in catalogue.states:
        model["aliases"] = catalogue.states[name].aliases
        if (failure := catalogue.states[name].failure) and model["state"] != "loaded":
            model["failure"] = failure
    return model


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/load", load, methods=["POST"]),
    Route("/v1/models/unload", unload, methods=["POST"]),
    Route("/v1/models/{model:path}", get_model),
]
