"""Loading vision models, as a whole or as text only, and the log lines about it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import get_total_parameters

from tests.models.drawings import COLOURS, SHAPES, drawn, plain
from tests.models.fixtures import model_folder
from tests.models.vision_models import EYES
from tests.worker.folders import copied, nothing
from tests.worker.image_questions import POCKET, Question, encoded, upstream
from tests.worker.vision_models import engine_request, folder_of, loaded
from worker.load import vision
from worker.load.config import read_config
from worker.load.load import ModelLoader
from worker.load.options import LoadOptions
from worker.runner.vision import VisionNetwork
from worker.values import SamplingParams

NAMES = (*EYES, POCKET)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_sees_says_so(name: str) -> None:
    facts = loaded(name).info
    assert facts.capabilities.images
    assert facts.capabilities.videos == (name == POCKET or name.startswith("qwen"))
    assert facts.parameters == get_total_parameters(upstream(name)[0])
    assert facts.batched
    assert facts.context_length > 0
    config = read_config(folder_of(name), name)
    assert config.kind == "vision"
    assert config.vocabulary == 2048 or name == POCKET


def test_a_conversion_without_eyes_serves_its_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """mlx-lm's own conversions: config.json still describes a vision tower."""
    folder = copied(tmp_path, "qwen3_5-eyes")
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    kept = {name: array for name, array in weights.items() if not name.startswith("vision_tower.")}
    mx.eval(kept)
    file.unlink()
    mx.save_safetensors(str(file), kept, metadata={"format": "mlx"})
    model = ModelLoader(str(folder)).load(nothing)
    assert not model.info.capabilities.images
    assert model.info.capabilities.image_problem.startswith("its weights have no vision tower")
    assert any("only text: its weights have no vision tower" in line for line in caplog.messages)


def test_a_machine_short_of_files_ends_the_load_instead_of_serving_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(folder: Path) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(vision, "require_files", failing)
    with pytest.raises(OSError, match="too many open files"):
        ModelLoader(str(model_folder("qwen3_5-eyes"))).load(nothing)


def test_inexact_eyes_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Patches the model so that tokens before an image attend to those after it."""
    embed = VisionNetwork.embed

    def embed_backwards(self: VisionNetwork, tokens: Sequence[int], pixels: Mapping[str, mx.array]) -> Any:
        features = embed(self, tokens, pixels)
        features.inputs_embeds = features.inputs_embeds + features.inputs_embeds.mean(axis=1, keepdims=True)
        return features

    monkeypatch.setattr(vision.VisionNetwork, "embed", embed_backwards)
    model = ModelLoader(str(model_folder("qwen3_5-eyes")), LoadOptions(probe_folder=None)).load(nothing)
    assert not model.info.capabilities.images
    assert any("its logits change when an image is run in chunks" in line for line in caplog.messages)


def test_fingerprint_changes_with_the_image_preprocessor_config(tmp_path: Path) -> None:
    name = "gemma3-eyes"
    folder = shutil.copytree(model_folder(name), tmp_path / "a-model")
    same = ModelLoader(str(folder), LoadOptions(served_name=name)).load(nothing).info
    assert same.fingerprint == loaded(name).info.fingerprint
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.4, 0.4]}))
    other = ModelLoader(str(folder), LoadOptions(served_name=name)).load(nothing).info
    assert other.fingerprint != same.fingerprint
    assert other.identity == same.identity


def say(question: str, *images: Any) -> str:
    """Return the embedded model's answer from our engine."""
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    asked = Question(({"role": "user", "content": content},), tuple(map(encoded, images)))
    model, request = loaded(POCKET), engine_request(POCKET, "a", asked)
    embeddings = {image.digest: model.engine.encode_image(image) for image in request.images}
    model.engine.set_images("a", request.tokens, request.images)
    model.engine.prefill({"a": request.tokens[:-1]}, embeddings=embeddings)
    model.engine.start("a", request.tokens, len(request.tokens), SamplingParams())
    output_processor, text = model.open_output_processor(request), ""
    while True:
        for token in model.engine.step().tokens.values():
            if token in request.end_tokens:
                model.engine.drop("a")
                return text + output_processor.flush().text
            text += output_processor.push(token).text


def test_the_pocket_model_names_colours_and_shapes() -> None:
    for colour in COLOURS:
        assert say("What colour is this image?", plain(colour)) == f"The image is {colour}."
    for shape in SHAPES:
        assert say("Which shape is this?", drawn(shape)) == f"It is a {shape}."
