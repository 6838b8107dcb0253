"""GET /v1/models, and each of them."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.routes.gateway import Gateway, gateway_of
from protocol.errors import Code, RequestError
from protocol.tasks import tasks


async def list_models(request: Request) -> Response:
    """Every model that is configured or that a worker has named, loaded or not."""
    gateway = gateway_of(request)
    names = sorted(gateway.dispatcher.fleet.models)
    return JSONResponse({"object": "list", "data": [_model_object(gateway, name) for name in names]})


async def get_model(request: Request) -> Response:
    """One model; ids may contain slashes, and aliases are answered too."""
    gateway = gateway_of(request)
    name = gateway.dispatcher.catalogue.resolve(request.path_params["model"]) or ""
    if name not in gateway.dispatcher.fleet.models:
        raise RequestError(Code.MODEL_NOT_FOUND, f"The model `{name}` does not exist here.", param="model")
    return JSONResponse(_model_object(gateway, name))


def _model_object(gateway: Gateway, name: str) -> dict[str, object]:
    known = gateway.dispatcher.fleet.models[name]
    catalogue = gateway.dispatcher.catalogue
    created = int(time.time() - (time.monotonic() - known.first_seen_at))
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "roundhouse"}
    if known.context_length:
        model["context_length"] = known.context_length
    if known.last is not None:
        model["tasks"] = tasks(known.last.capabilities)
    model["state"] = catalogue.state(name)
    if name in catalogue.states:
        model["aliases"] = catalogue.states[name].aliases
    return model


ROUTES = [Route("/v1/models", list_models), Route("/v1/models/{model:path}", get_model)]
