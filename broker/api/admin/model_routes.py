"""GET /v1/models[/ID] in OpenAI's format, or in Anthropic's if the request has an `anthropic-version`
header. POST /v1/models/load, /unload, /pin, /unpin: orders for a model that is loaded on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.admin.body import read_choice
from broker.dispatch.catalogue import LOAD_ORDER_S_MAX
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.fleet import ModelEntry, unknown_model
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.requests.status_streams import changes_of, check_watchers
from broker.state import gateway_of
from protocol.adapters import SEPARATOR
from protocol.errors import adapter_not_found
from protocol.supervisor_messages import PullState
from protocol.tasks import tasks
from protocol.types import AdapterInfo

CHOICE_BYTES_MAX = 4096
PULL_S_MAX = 24 * 3600.0
"""Maximum time of a stream of a download's progress; the download goes on after it."""
_LOADED, _UNLOADED = frozenset(("loaded", "failed")), frozenset(("unloaded", "failed"))
_ANY = _LOADED | _UNLOADED | {"loading"}


async def list_models(request: Request) -> Response:
    """List every model that is configured or that a worker has announced, loaded or not."""
    dispatcher = gateway_of(request).dispatcher
    names = sorted(dispatcher.fleet.models)
    if _is_anthropics(request):
        listed = [_anthropics(dispatcher, name) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JsonResponse({"data": listed, "has_more": False, **ends})
    listed = [_model_object(dispatcher, name) for name in names]
    adapters = [(name, info) for name in names for info in dispatcher.adapters.known(name)]
    listed += [_adapter_object(dispatcher, name, info) for name, info in adapters]
    # Codex fails without `models`. It is empty: an entry would have to replace the agent's own prompt.
    for_codex: dict[str, object] = {"models": []} if "client_version" in request.query_params else {}
    return JsonResponse({"object": "list", "data": listed, **for_codex})


async def get_model(request: Request) -> Response:
    """Return one model, by id or alias; ids may contain slashes."""
    dispatcher = gateway_of(request).dispatcher
    asked, adapter = dispatcher.adapters.split(request.path_params["model"], dispatcher.catalogue.resolve)
    name = dispatcher.catalogue.resolve(asked)
    if name not in dispatcher.fleet.models:
        raise unknown_model(name, dispatcher.fleet.models)
    if adapter:
        found = [info for info in dispatcher.adapters.known(name) if info.name == adapter]
        if not found:
            raise adapter_not_found(name, adapter)
        return JsonResponse(_adapter_object(dispatcher, name, found[0]))
    return JsonResponse((_anthropics if _is_anthropics(request) else _model_object)(dispatcher, name))


async def load(request: Request) -> Response:
    """Have a model loaded."""
    return await _ordered(request, gateway_of(request).dispatcher.catalogue.load, ends=_LOADED)


async def unload(request: Request) -> Response:
    """Have an idle model unloaded."""
    return await _ordered(request, gateway_of(request).dispatcher.catalogue.unload, ends=_UNLOADED)


async def pin(request: Request) -> Response:
    """Have a model loaded, and not unloaded before it is unpinned or the gateway ends."""
    return await _ordered(request, gateway_of(request).dispatcher.catalogue.pin, ends=_LOADED)


async def unpin(request: Request) -> Response:
    """Let a pinned model be unloaded again."""
    return await _ordered(request, gateway_of(request).dispatcher.catalogue.unpin, ends=_ANY)


async def _ordered(request: Request, order: Callable[[str], str], *, ends: frozenset[str]) -> Response:
    """Give an order for a model; return it without waiting, or stream its changes up to a state in `ends`."""
    gateway = gateway_of(request)
    choice = read_choice(await read_body(request, CHOICE_BYTES_MAX))
    if choice.stream:
        check_watchers(gateway)
    name = order(choice.model)
    if not choice.stream:
        return JsonResponse(_model_object(gateway.dispatcher, name))
    return changes_of(
        gateway,
        "model",
        partial(_model_object, gateway.dispatcher, name),
        is_last=lambda model: model["state"] in ends,
        s_max=LOAD_ORDER_S_MAX,
    )


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _created(known: ModelEntry) -> int:
    """Return the Unix time at which the model was first seen."""
    return int(time.time() - (time.monotonic() - known.first_seen_at))


def _anthropics(dispatcher: Dispatcher, name: str) -> dict[str, object]:
    known = dispatcher.fleet.models[name]
    created_at = datetime.fromtimestamp(_created(known), UTC).isoformat().replace("+00:00", "Z")
    model = {"type": "model", "id": name, "display_name": name, "created_at": created_at}
    return {**model, "lifecycle": "active", "max_input_tokens": known.context_length or None}


def _model_object(dispatcher: Dispatcher, name: str) -> dict[str, object]:
    known, catalogue = dispatcher.fleet.models[name], dispatcher.catalogue
    created = _created(known)
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "roundhouse"}
    if known.context_length:
        model["context_length"] = known.context_length
    if known.last is not None:
        model["tasks"] = tasks(known.last.capabilities)
        if unread := known.last.capabilities.unread:
            model["unread"] = unread
        if image_problem := known.last.capabilities.image_problem:
            model["image_problem"] = image_problem
        if (kv := known.last.kv_quantization) is not None:
            model["kv_cache"] = {"bits": kv.bits, "group_size": kv.group_size}
    model["state"] = catalogue.state(name)
    if catalogue.is_pinned(name):
        model["pinned"] = True
    if (progress := dispatcher.fleet.loading_progress(name)) is not None:
        model["loading"] = {"done": progress[0], "total": progress[1]}
    if name in catalogue.states:
        model["aliases"] = catalogue.states[name].aliases
        if (failure := catalogue.states[name].failure) and model["state"] != "loaded":
            model["failure"] = failure
    return model


def _adapter_object(dispatcher: Dispatcher, name: str, info: AdapterInfo) -> dict[str, object]:
    """Return an adapter as a model of its own, MODEL:NAME, with vLLM's fields `root` and `parent`."""
    base = _model_object(dispatcher, name)
    adapter: dict[str, object] = {"id": f"{name}{SEPARATOR}{info.name}", "object": "model"}
    adapter |= {"created": base["created"], "owned_by": "roundhouse", "root": name, "parent": name}
    kept = ("context_length", "tasks", "state")
    return adapter | {"rank": info.rank} | {key: base[key] for key in kept if key in base}


# --- POST /v1/models/pull: download a model of the hub. GET /v1/models/pull[/ID], POST …/ID/cancel ---
#
# The supervisor downloads; the gateway only orders and reports. A client that leaves cancels nothing.


async def pull(request: Request) -> Response:
    """Order a download; return it without waiting, or stream its progress up to its end."""
    gateway = gateway_of(request)
    choice = read_choice(await read_body(request, CHOICE_BYTES_MAX))
    if choice.stream:
        check_watchers(gateway)
    catalogue = gateway.dispatcher.catalogue
    state = catalogue.pulls.order(choice.model)
    catalogue.update()
    if not choice.stream:
        return JsonResponse(_object(state))

    def document() -> dict[str, object]:
        return _object(catalogue.pulls.state(state.id))

    return changes_of(
        gateway, "pull", document, is_last=lambda pull: pull["status"] != "running", s_max=PULL_S_MAX
    )


async def show_all(request: Request) -> Response:
    """List the downloads that run, and the last ones."""
    pulls = gateway_of(request).dispatcher.catalogue.pulls
    return JsonResponse({"object": "list", "data": [_object(state) for state in pulls.states()]})


async def show(request: Request) -> Response:
    """Return a download."""
    pulls = gateway_of(request).dispatcher.catalogue.pulls
    return JsonResponse(_object(pulls.state(request.path_params["id"])))


async def cancel(request: Request) -> Response:
    """Cancel a download. A finished one stays as it is."""
    catalogue = gateway_of(request).dispatcher.catalogue
    state = catalogue.pulls.cancel(request.path_params["id"])
    catalogue.update()
    return JsonResponse(_object(state))


def _object(state: PullState) -> dict[str, object]:
    progress = {"done_bytes": state.done_bytes, "total_bytes": state.total_bytes}
    pull = {"id": state.id, "object": "model.pull", "model": state.model, "status": state.stage, **progress}
    return pull | ({"failure": state.failure} if state.failure else {})


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/pull", show_all, methods=["GET"]),
    Route("/v1/models/pull", pull, methods=["POST"]),
    Route("/v1/models/pull/{id}", show, methods=["GET"]),
    Route("/v1/models/pull/{id}/cancel", cancel, methods=["POST"]),
    Route("/v1/models/load", load, methods=["POST"]),
    Route("/v1/models/unload", unload, methods=["POST"]),
    Route("/v1/models/pin", pin, methods=["POST"]),
    Route("/v1/models/unpin", unpin, methods=["POST"]),
    Route("/v1/models/{model:path}", get_model),
]
