"""POST /v1/models/pull: download a model of the hub. GET /v1/models/pull[/ID], POST …/ID/cancel.

The supervisor downloads; the gateway only orders and reports. A client that leaves cancels nothing.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.admin.body import read_choice
from broker.middleware.json_response import JsonResponse
from broker.requests.request_body import read_body
from broker.requests.status_streams import changes_of, check_watchers
from broker.state import gateway_of
from protocol.supervisor_messages import PullState

CHOICE_BYTES_MAX = 4096
STREAM_S_MAX = 24 * 3600.0
"""Maximum time of a stream of progress; the download goes on after it."""


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
        gateway, "pull", document, is_last=lambda pull: pull["status"] != "running", s_max=STREAM_S_MAX
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
    Route("/v1/models/pull", show_all, methods=["GET"]),
    Route("/v1/models/pull", pull, methods=["POST"]),
    Route("/v1/models/pull/{id}", show, methods=["GET"]),
    Route("/v1/models/pull/{id}/cancel", cancel, methods=["POST"]),
]
