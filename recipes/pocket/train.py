"""Training: AdamW and Muon on batches of about 2,048 tokens, with checkpoints from which it resumes.

Muon, known to need fewer tokens than AdamW, updates the layers' matrices; AdamW updates embeddings, norms,
convolutions and parameters outside the layers. The learning rate is warmed up, kept constant, and then
reduced to zero, so that the end can be moved during a run.

First a young model, whose vision tower is pre-trained, learns short dialogues and then longer ones; then a
larger model is grown from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from recipes.pocket import together, weights
from recipes.pocket.batches import Batch, stream
from recipes.pocket.model import GROWN, YOUNG, Shape, new_model
from recipes.pocket.muon import Muon
from recipes.pocket.progress_log import ProgressLog
from recipes.pocket.synthesize import Phase
from recipes.pocket.vision_training import teach_eyes

BATCH_TOKENS = 2048
LOG = "train.log"
_MUON_RATE, _ADAM_RATE = 5e-3, 2.5e-3
_WARM_UP = 80
_MIXED_FROM, _LONG_FROM = 0.18, 0.6
"""Shares of the steps after which the mixture becomes `mixed`, and `long`."""
_CHECKPOINT_EVERY = 200


@dataclass(frozen=True)
class Plan:
    """One training run: model shape, number of steps, mixture and learning rates."""

    shape: Shape
    steps: int
    """Steps of about 2,000 tokens over all processes: each of two processes runs half as many."""
    mixture: Phase | None = None
    """Mixture of all steps, for a model that is grown from another."""
    rate: float = 1.0
    """Factor on `_MUON_RATE` and `_ADAM_RATE`."""
    decay_share: float = 0.4
    """Share of the steps, at the end, over which the rates fall to zero."""


FIRST = Plan(YOUNG, steps=6000)
THEN = Plan(GROWN, steps=14000, mixture="grown", rate=0.7, decay_share=0.7)


def train(folder: Path, tokenizer: Any, seed: int, plan: Plan, start: Path | None = None) -> Any:
    """Train, or resume from the checkpoint in `folder`, and return the model.

    `start`: a model folder with the initial weights.
    """
    plan = replace(plan, steps=plan.steps // together.count())
    model = new_model(tokenizer.get_vocab(), seed, plan.shape)
    optimizers = _optimizers(model)
    done = _resume(folder / "checkpoint.pt", model, optimizers)
    if not done:
        if start is not None:
            load(model, start)
        else:
            teach_eyes(model.model.visual, model.config.text_config.hidden_size, seed, folder / LOG)
    together.agree(model)
    model.train()
    phase: Phase | None = None
    told = ProgressLog(folder / LOG)
    for step in range(done, plan.steps):
        if _phase(step, plan) != phase:
            phase = _phase(step, plan)
            batches = _stream(tokenizer, phase, f"{seed} {phase} {step}")
        told.step(step + 1, phase, _step(model, optimizers, next(batches), _rate(step, plan) * plan.rate))
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == plan.steps:
            _save(folder / "checkpoint.pt", model, optimizers, step + 1)
    model.eval()
    return model


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """Return the last layer's output. The padding is on the right, where a causal model cannot attend to
    it."""
    if batch.pixels is None:
        text: torch.Tensor = model.model.language_model(
            input_ids=batch.ids, use_cache=False
        ).last_hidden_state
        return text
    kinds = (batch.ids == model.config.image_token_id).int()
    seen: torch.Tensor = model.model(
        input_ids=batch.ids,
        pixel_values=batch.pixels,
        image_grid_thw=batch.grids,
        mm_token_type_ids=kinds,
        use_cache=False,
    ).last_hidden_state
    return seen


def _step(model: Any, optimizers: list[Any], batch: Batch, rate: float) -> float:
    rows, columns = batch.learnt
    hidden = hidden_states(model, batch)[rows, columns - 1]
    logits = model.lm_head(hidden)
    loss = F.cross_entropy(logits, batch.ids[rows, columns])
    loss.backward()
    together.average_gradients(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, full in zip(optimizers, (_MUON_RATE, _ADAM_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = full * rate
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _optimizers(model: Any) -> list[Any]:
    muon, adam = [], []
    for name, parameter in model.named_parameters():
        layered = any(part in name for part in (".language_model.layers.", ".visual.blocks.", ".merger."))
        # A patch of one colour repeats a number 512 times. In an orthogonalized step that one direction does
        # not dominate those of shapes.
        is_matrix = (parameter.ndim == 2 and layered) or (parameter.ndim > 2 and "patch_embed" in name)
        (muon if is_matrix else adam).append(parameter)
    return [
        Muon([{"params": muon}], rate=_MUON_RATE, decay=0.02),
        torch.optim.AdamW(adam, lr=_ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]


def _rate(step: int, plan: Plan) -> float:
    left = (plan.steps - step) / (plan.steps * plan.decay_share)
    return min(1.0, (step + 1) / _WARM_UP, max(0.02, (1 - math.cos(math.pi * min(1.0, left))) / 2))


def _phase(step: int, plan: Plan) -> Phase:
    if plan.mixture is not None:
        return plan.mixture
    if step < _MIXED_FROM * plan.steps:
        return "short"
    return "mixed" if step < _LONG_FROM * plan.steps else "long"


def _stream(tokenizer: Any, phase: Phase, seed: str) -> Iterator[Batch]:
    longest = {"short": 192, "mixed": 448, "long": 1024, "grown": 2400}[phase]
    # The first process draws the same batches as a single process.
    own = f" {together.number()}" if together.number() else ""
    return stream(tokenizer, phase, BATCH_TOKENS, longest, seed + own)


def load(model: Any, folder: Path) -> None:
    """Load the weights in `folder`, of a model of the same size or smaller.

    Additional layers and neurons contribute nothing at first, because their output weights are zero. So a
    grown model answers like the small one until it is trained.
    """
    small = weights.read(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in small:
                corner = tuple(slice(0, size) for size in small[name].shape)
                if small[name].shape != tensor.shape and name.endswith("down_proj.weight"):
                    tensor.zero_()
                tensor[corner] = small[name]
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor.zero_()


def _save(path: Path, model: Any, optimizers: list[Any], step: int) -> None:
    if together.number():
        return
    draft = path.with_suffix(".draft")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": states, "step": step}, draft)
    draft.replace(path)


def _resume(path: Path, model: Any, optimizers: list[Any]) -> int:
    if not path.is_file():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(saved["step"])
