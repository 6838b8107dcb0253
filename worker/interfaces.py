"""Interfaces between the worker's parts: engine, loader, preparers, output processor, drafters, adapters.

`worker/load` and `worker/runner` implement them on MLX, the tests with scripts. With `worker/values.py` the
worker's lowest layer, without MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from protocol.messages import Embed, Generate, Rank
from protocol.types import AdapterInfo
from worker.values import (
    NEVER,
    NO_DRAFTS,
    NO_EMBEDDINGS,
    NO_LAST,
    NO_TARGETS,
    ArrayBytes,
    CacheSegment,
    CacheSlice,
    CacheSpec,
    CancelToken,
    EncodedImage,
    EngineRequest,
    ForcedTokens,
    ImageInput,
    Logprob,
    LogprobTargets,
    ModelInfo,
    OutputDelta,
    PreparedTexts,
    SamplingParams,
    StepOutput,
    Text,
    Tokenized,
)


class DraftProposer(Protocol):
    """Draft network with its own row (and cache) for each row of the engine, under the same name.

    Used by the model thread only. Draft tokens change the speed, never the output.
    """

    relative_cost: float
    """Cost of one draft pass, relative to one token of the target model."""

    def knows(self, row: str) -> bool:
        """Return whether the row's unread tokens can still be read."""

    def length(self, row: str) -> int:
        """Return the number of the row's tokens that are read, or skipped for good; 0 for a new row."""

    def read(self, row: str, tokens: Sequence[int]) -> None:
        """Prefill the next tokens of a row. Returns when they are computed."""

    def draft(self, new_tokens: Mapping[str, Sequence[int]], count: int) -> Mapping[str, Sequence[int]]:
        """Return up to `count` draft tokens for each row in `new_tokens`. `new_tokens`: each row's unread
        tokens, 1 to `BACKLOG_MAX`, which are read now."""

    def drop(self, row: str) -> None:
        """Drop a row. Unknown rows are no error."""

    def reset(self) -> None:
        """Drop all rows."""

    def cache_bytes(self) -> int:
        """Return the bytes of all rows' caches."""

    def row_bytes(self, tokens: int) -> int:
        """Return the cache bytes of a row of `tokens` tokens."""


class ImportanceScorer(DraftProposer, Protocol):
    """Drafter that also scores the importance of prompt tokens, for sparse prefill."""

    def score_tokens(self, row: str, last: int) -> Sequence[float] | None:
        """Return the importance of each token that the row has read, for the tokens after `last`, the next
        token. None: incomplete, after about one step's work; call again. The row does not change."""


class Encoder(Protocol):
    """Encoder of an embedding model or reranker. Used by the model thread only."""

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        """Return each text's vector as little-endian float32. The encoder pads as needed: a vector does not
        depend on the other texts."""


class TextsPreparer(Protocol):
    """Tokenizer. Owned by one thread of the pool, never shared; does not use MLX."""

    def prepare(
        self, request: Embed | Rank, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> PreparedTexts:
        """Tokenize the texts. Raises `protocol.errors.RequestError` for an invalid request, and
        `PreparationCancelled` after a cancellation."""


class AdapterError(Exception):
    """An adapter cannot be served. The message is for the user: the end of a sentence about it, without the
    folder."""


class AdapterSet(Protocol):
    """The adapters of one model. Used by the model thread only."""

    @property
    def infos(self) -> Sequence[AdapterInfo]:
        """The adapters that rows may use."""

    def load(self, name: str, folder: Path, bytes_max: int) -> AdapterInfo:
        """Load an adapter of at most `bytes_max` bytes. Raises `AdapterError`; nothing has changed then."""

    def unload(self, name: str) -> None:
        """Remove an adapter that no row uses. Unknown ones are no error."""


Progress = Callable[[int, int], None]
"""Callback during loading, on the model thread: (bytes of weights loaded, bytes in total)."""


class ModelError(Exception):
    """A model cannot be loaded. The message is for the user; retrying does not help."""


class InsufficientMemoryError(Exception):
    """A model does not fit into the memory that is free now. Retrying later may help."""


class Preparer(Protocol):
    """Chat template and tokenizer. Owned by one thread of the pool, never shared; does not use MLX."""

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        """Render and tokenize a request. Raises `protocol.errors.RequestError` for an invalid request, and
        `PreparationCancelled` after a cancellation."""

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        """Tokenize a prompt, even an empty one or one beyond the context, as `request.tokenizing` says.
        Raises as `prepare` does."""


class OutputProcessor(Protocol):
    """Detokenizer and output parser of one request: a function of the tokens alone."""

    stopped: bool
    """A stop string was found, or the only permitted tool call is complete: no more output follows."""
    reasoning_tokens: int
    """Number of pushed tokens that are reasoning."""
    has_called: bool
    """A tool call is complete."""

    @property
    def stop_string(self) -> str:
        """The stop string that was found; empty: none."""

    def push(self, token: int) -> OutputDelta:
        """Return the output that `token` completes: whole characters that cannot be part of a marker or stop
        string."""

    def flush(self, *, has_ended: bool = False) -> OutputDelta:
        """Return the buffered output, when no token follows. `has_ended`: the model has ended the answer by
        itself, so a tool call that only lacks its closing is complete."""

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token, independent of pushed tokens; for logprobs."""


class Engine(Protocol):
    """Engine of one model. A row is prefilled in chunks, then decodes in a batch with all others.

    Used by the model thread only.
    """

    shape: CacheSpec | None
    """What must be stored of a row to restore it; None if rows cannot be restored."""
    drafter: DraftProposer | None
    """Proposer of draft tokens; rows dropped here are dropped there too. None: there is none."""
    importance_scorer: ImportanceScorer | None
    """Scorer of token importance, the same object as the drafter. None: there is none."""
    can_skip_tokens: bool
    """Whether parts of a prompt can be skipped."""

    def encode_image(self, image: ImageInput) -> EncodedImage:
        """Encode an image, at any position. Returns when it is computed."""

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        """Set the images of a row's prompt. Call it before any of it is prefilled or restored. They are
        dropped with the row, and copied by `fork`. Cheap: nothing is encoded here."""

    def set_adapter(self, row: str, adapter: str) -> None:
        """Set the adapter of a row, which the model has. Call it before any of the row is prefilled or
        restored. It is dropped with the row, and copied by `fork`."""

    def expect_tokens(self, row: str, tokens: int) -> None:
        """Set the number of tokens that a row will be prefilled with, so that its caches are allocated once.
        Call it before any of the row is prefilled or restored."""

    def prefill(
        self,
        chunks: Mapping[str, Sequence[int]],
        targets: Mapping[str, LogprobTargets] = NO_TARGETS,
        last: Mapping[str, int] = NO_LAST,
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
    ) -> Mapping[str, Sequence[Logprob]]:
        """Prefill a chunk of each row's prompt; over all calls, everything but the prompt's last token.

        `last`: that token, of rows whose prompt ends with this chunk and which are started before any other
        call runs them. The engine may feed it along, and sample the row's first token from this pass.
        Several rows may be prefilled together. This is fastest if all are at one position, with chunks of
        about equal length. Returns the logprobs that `targets` requests, one for each token.
        `embeddings`: of the chunks' images, by digest. A row with images is prefilled alone.
        If this raises, the rows' caches are lost: drop the rows.
        """

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        """Skip the tokens from `first`, the row's current position, to `last` (exclusive). Later tokens keep
        their positions. The row can then be neither stored nor drafted for."""

    def fork(self, row: str, copy: str) -> None:
        """Make the row `copy` at the position of `row`, which is not started; both prompts begin equally."""

    def start(
        self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams
    ) -> StepOutput:
        """Add the row to the batch at the next step, which feeds the last of `tokens`; or, if `prefill` has
        fed it, the row's first token, which is returned.

        `tokens`: the prompt (the first `prompt_tokens`) and the output so far, if the row was preempted or
        resumed. All but the last have been prefilled. Cheap: no forward pass is run here.
        """

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        """Feed every started row its last token; return the tokens sampled by the previous call.

        A row's first token is thus returned by the second step after its start, if not by `start`. Rows that
        have ended or failed must be dropped before the next call.

        `drafts`: draft tokens of some rows, which follow all returned tokens. They are verified in one pass.
        Accepted tokens and the one behind them are returned by this call, not by the next. The output is the
        same as without drafts.
        """

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        """Return at most `most` tokens that a started row's forced tokens and grammar imply next, to be
        drafted. Computes no forward pass."""

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        """Copy the KV cache of a row for each run (first position, end), and with `states` its recurrent
        states behind all tokens fed. Waits for the current step."""

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        """Make a row that is prefilled up to the end of the last piece. `states`: the payload of a state
        snapshot made there. Images set by `set_images` remain."""

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        """Serialize a payload for a file: arrays by name, and metadata for JSON."""

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate memory for the bytes of a file. What `unpack` gets in it is not copied again."""

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        """Deserialize a payload from a file. Raises if it is not one of this engine."""

    def drop(self, row: str) -> None:
        """Drop a row in any state. Unknown rows are no error."""

    def reset(self) -> None:
        """Drop all rows, after a failed step."""

    def cache_bytes(self) -> int:
        """Return the bytes of all rows' caches."""

    def row_bytes(self, tokens: int) -> int:
        """Return the cache bytes of a row of `tokens` tokens, estimated without evaluation."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, returned by its loader on the model thread."""

    info: ModelInfo
    engine: Engine
    open_preparer: Callable[[int], Preparer]
    """Called once on each thread of the pool, with the context length that fits into memory."""
    open_output_processor: Callable[[EngineRequest], OutputProcessor]
    """Called on the model thread, once for each request."""
    adapters: AdapterSet | None = None
    """None: it serves none."""
    position_cost: float | None = None
    """Cost of each additional token in a step of one row, relative to a plain step, measured with
    `PRICED_COLUMNS` tokens. None: not measured."""
    release_memory: Callable[[], None] = lambda: None
    """Gives memory that no array uses back to the system."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A loaded embedding model or reranker; otherwise as `Model`."""

    info: ModelInfo
    encoder: Encoder
    open_preparer: Callable[[], TextsPreparer]
    release_memory: Callable[[], None] = lambda: None


class Loader(Protocol):
    """Loader of one model."""

    name: str
    """The model's name in the API, known before it is loaded."""

    def load(self, progress: Progress) -> Model | EmbeddingModel:
        """Load and warm up the model, on the model thread. Raises `ModelError`."""
