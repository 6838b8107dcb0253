"""Requests on the I/O thread: each is forwarded to the model thread, and has one end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from protocol.errors import Code, RequestError
from protocol.messages import Embed, Failed, Finished, Generate, Message, Rank, Ready
from protocol.settings.worker import WorkerSettings
from protocol.types import Capabilities, TokenizeOptions
from tests import factories
from tests.scripted_worker.loader import FakeLoader
from tests.system import eventually
from tests.worker.texts import prepared_texts
from worker.core.commands import Abort, Command, Submit, SubmitTexts
from worker.gateway.model_thread import ModelThread
from worker.gateway.outbox import Outbox
from worker.gateway.requests import Requests
from worker.input.pool import BYTES_MAX, PreparerPool
from worker.values import NEVER, CancelToken, EngineRequest, PreparedTexts, Tokenized

WAIT_S = 20.0
GENERATES = Capabilities()
EMBEDS = Capabilities(generation=False, embeddings=True)


class Scripted:
    """Prepares any request, once it is allowed to."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()

    def prepare(
        self, request: Generate | Embed | Rank, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest | PreparedTexts:
        assert self.may.wait(WAIT_S)
        if not isinstance(request, Generate):
            return prepared_texts(request.id, 3, 4)
        if request.prompt == "refuse":
            raise RequestError(Code.INVALID_REQUEST, "No.", param="prompt")
        return factories.engine_request(request.id, 2)

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        return Tokenized(id=request.id, count=2, tokens=(7, 8), pieces=("a", "b"), text="ab")


class Desk:
    """A worker's requests whose model thread does not run: its commands stay in the inbox."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.preparer = Scripted()
        self.woken = threading.Semaphore(0)
        self.outbox = Outbox()
        self.model = ModelThread(FakeLoader("m"), WorkerSettings(), "w", self.outbox)
        self.requests = Requests("w", model=self.model, send=self.said.append, wake=self.woken.release)

    def load(self, able: Capabilities = GENERATES) -> None:
        self.model.pool = PreparerPool(lambda: self.preparer)  # type: ignore[arg-type, return-value]
        ready = Ready(incarnation="w", model="m", context_length=64, running_max=1, capabilities=able)
        self.model._tell_ready(ready)

    def close(self) -> None:
        self.preparer.may.set()
        if self.model.pool is not None:
            self.model.pool.close()
        self.outbox.close()

    def take(self, *requests: Generate | Embed) -> None:
        """Submit requests and wait until each is prepared or was refused."""
        for request in requests:
            self.requests.take(request, [])
        for _ in range(self.requests.preparing):
            assert self.woken.acquire(timeout=WAIT_S)
        self.requests.pass_on()

    def commands(self) -> list[Command]:
        return [self.model.inbox.get_nowait() for _ in range(self.model.inbox.qsize())]


TEXTS = factories.embed(["a", "b"])


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def generate(id: str, prompt: str = "hi", *, counted: bool = False) -> Generate:
    tokenizing = TokenizeOptions(tokens=True, pieces=True) if counted else None
    return factories.request(id, prompt=prompt, tokenizing=tokenizing)


def test_a_prompt_is_accepted_once_and_goes_to_the_model(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a"))
    desk.take(generate("a"))
    assert desk.said == [factories.accepted(prompt_tokens=2)]
    [submitted] = desk.commands()
    assert isinstance(submitted, Submit)
    assert submitted.request.id == "a"
    assert (len(desk.requests), desk.requests.preparing) == (1, 0)


def test_texts_are_accepted_with_the_tokens_of_all_and_go_to_the_model(desk: Desk) -> None:
    desk.load(EMBEDS)
    desk.take(TEXTS)
    assert desk.said == [factories.accepted(prompt_tokens=7)]
    assert desk.commands() == [SubmitTexts(prepared_texts("a", 3, 4))]


def test_a_prompt_that_is_counted_ends_without_the_model(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a", counted=True))
    accepted, finished = desk.said
    assert accepted == factories.accepted(prompt_tokens=2, prompt="ab", tokens=[7, 8], pieces=["a", "b"])
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.prompt_tokens, finished.usage.completion_tokens) == ("stop", 2, 0)
    assert desk.commands() == []


@pytest.mark.parametrize("request_", [generate("a", counted=True), TEXTS])
def test_request_before_the_model_is_loaded_is_refused(desk: Desk, request_: Generate | Embed) -> None:
    desk.take(request_)
    [failed] = desk.said
    assert isinstance(failed, Failed)
    assert failed.code == Code.MODEL_LOADING


@pytest.mark.parametrize(
    ("able", "request_"), [(GENERATES, TEXTS), (EMBEDS, generate("a")), (EMBEDS, generate("a", counted=True))]
)
def test_unsupported_request_is_refused(desk: Desk, able: Capabilities, request_: Generate | Embed) -> None:
    desk.load(able)
    desk.preparer.may.clear()  # it would never return
    desk.take(request_)
    [failed] = desk.said
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == (Code.INVALID_REQUEST, "model")
    assert desk.requests.preparing == 0


def test_one_is_there_until_its_end_is_sent(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a", "refuse"), generate("b"))
    assert len(desk.requests) == 2
    desk.requests.sent(desk.said)
    assert len(desk.requests) == 1
    assert [type(message) for message in desk.said if message.id == "a"] == [Failed]  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["one", "all"])
def test_request_cancelled_during_preparation_is_not_passed_on(desk: Desk, which: str) -> None:
    desk.load()
    desk.preparer.may.clear()
    desk.requests.take(generate("a"), [])
    if which == "all":
        desk.requests.abandon()
    else:
        desk.requests.cancel("a")
    desk.preparer.may.set()
    pool = desk.model.pool
    assert pool is not None
    eventually(lambda: not pool.status().running, within_s=WAIT_S, what="the thread is free")
    assert (pool.status().waiting, pool.status().cancelled) == (0, 1)
    desk.requests.pass_on()
    assert desk.said == []
    assert desk.commands() == [Abort("a")]
    assert len(desk.requests) == 0


def test_request_that_the_queue_has_no_room_for_is_refused_at_once(desk: Desk) -> None:
    desk.load()
    desk.preparer.may.clear()
    desk.requests.take(generate("a"), [bytes(BYTES_MAX)])
    desk.requests.take(generate("b"), [])
    [failed] = desk.said
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == ("b", Code.TEXT_GENERATION_BUSY)
    assert desk.requests.preparing == 1
