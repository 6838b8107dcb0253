"""Requests on the I/O thread: each on its way to the model thread, and to one end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Embed, Failed, Finished, Generate, Message, Rank, Ready
from protocol.parts import Capabilities, Sampling, Tokenizing
from protocol.workersettings import WorkerSettings
from tests.worker.texts import prepared
from worker.contract import Draw, Prepared, Tokenized
from worker.fake.loader import FakeLoader
from worker.line.modelthread import ModelThread
from worker.line.outbox import Outbox
from worker.line.pool import PreparerPool
from worker.line.requests import Requests
from worker.schedule.commands import Command, Drop, Encode, Submit
from worker.texts import PreparedTexts

WAIT_S = 20.0
GENERATES = Capabilities()
EMBEDS = Capabilities(generation=False, embeddings=True)


class Scripted:
    """Prepares whatever comes, once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()

    def prepare(self, request: Generate | Embed | Rank, media: Sequence[bytes]) -> Prepared | PreparedTexts:
        assert self.may.wait(WAIT_S)
        if not isinstance(request, Generate):
            return prepared(request.id, 3, 4)
        if request.prompt == "refuse":
            raise RequestError(Code.INVALID_REQUEST, "No.", param="prompt")
        return Prepared(
            id=request.id, tokens=(1, 2), draw=Draw(), stop=(), max_tokens=1, end_tokens=frozenset()
        )

    def tokenize(self, request: Generate, media: Sequence[bytes]) -> Tokenized:
        return Tokenized(id=request.id, count=2, tokens=(7, 8), pieces=("a", "b"), text="ab")


class Desk:
    """The requests of a worker whose model thread does not run: what it is told stays in its inbox."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.preparer = Scripted()
        self.woken = threading.Semaphore(0)
        self.outbox = Outbox()
        self.model = ModelThread(FakeLoader("m"), WorkerSettings(), "w", self.outbox)
        self.requests = Requests("w", model=self.model, say=self.said.append, wake=self.woken.release)

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
        """Until each is prepared, or was refused at once."""
        for request in requests:
            self.requests.take(request, [])
        for _ in range(self.requests.preparing):
            assert self.woken.acquire(timeout=WAIT_S)
        self.requests.pass_on()

    def commands(self) -> list[Command]:
        return [self.model.inbox.get_nowait() for _ in range(self.model.inbox.qsize())]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def generate(id: str, prompt: str = "hi", *, counted: bool = False) -> Generate:
    tokenizing = Tokenizing(tokens=True, pieces=True) if counted else None
    sampling = Sampling(seed=1)
    return Generate(incarnation="g", id=id, sampling=sampling, prompt=prompt, tokenizing=tokenizing)


def embed(id: str) -> Embed:
    return Embed(incarnation="g", id=id, texts=pack(["a", "b"]), count=2)


def test_a_prompt_is_accepted_and_goes_to_the_model(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a"))
    assert desk.said == [Accepted(incarnation="w", id="a", prompt_tokens=2)]
    [submitted] = desk.commands()
    assert isinstance(submitted, Submit)
    assert submitted.request.id == "a"
    assert (len(desk.requests), desk.requests.preparing) == (1, 0)


def test_texts_are_accepted_with_the_tokens_of_all_and_go_to_the_model(desk: Desk) -> None:
    desk.load(EMBEDS)
    desk.take(embed("a"))
    assert desk.said == [Accepted(incarnation="w", id="a", prompt_tokens=7)]
    assert desk.commands() == [Encode(prepared("a", 3, 4))]


def test_a_prompt_that_is_counted_ends_without_the_model(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a", counted=True))
    accepted, finished = desk.said
    assert accepted == Accepted(
        incarnation="w", id="a", prompt_tokens=2, prompt="ab", tokens=[7, 8], pieces=["a", "b"]
    )
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.prompt_tokens, finished.usage.completion_tokens) == ("stop", 2, 0)
    assert desk.commands() == []


@pytest.mark.parametrize("request_", [generate("a"), generate("a", counted=True), embed("a")])
def test_what_comes_before_the_model_is_loaded_is_refused(desk: Desk, request_: Generate | Embed) -> None:
    desk.take(request_)
    [failed] = desk.said
    assert isinstance(failed, Failed)
    assert failed.code == Code.MODEL_LOADING


@pytest.mark.parametrize(
    ("able", "request_"),
    [(GENERATES, embed("a")), (EMBEDS, generate("a")), (EMBEDS, generate("a", counted=True))],
)
def test_what_the_model_is_not_made_for_never_reaches_its_tokenizer(
    desk: Desk, able: Capabilities, request_: Generate | Embed
) -> None:
    desk.load(able)
    desk.preparer.may.clear()  # it would never come back
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


def test_one_that_is_here_already_is_not_taken_again(desk: Desk) -> None:
    desk.load()
    desk.take(generate("a"))
    desk.take(generate("a"))
    assert len(desk.said) == len(desk.commands()) == 1


@pytest.mark.parametrize("id", ["a", None])
def test_who_is_cancelled_while_it_is_prepared_is_not_passed_on(desk: Desk, id: str | None) -> None:
    desk.load()
    desk.preparer.may.clear()
    desk.requests.take(generate("a"), [])
    if id is None:
        desk.requests.abandon()
    else:
        desk.requests.cancel(id)
    desk.preparer.may.set()
    assert desk.woken.acquire(timeout=WAIT_S)
    desk.requests.pass_on()
    assert desk.said == []
    assert desk.commands() == [Drop(id)]
    assert len(desk.requests) == 0
