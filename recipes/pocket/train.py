"""Training: AdamW and Muon on batches of about 2,048 tokens, with checkpoints from which it resumes.

The layers' matrices are stepped by Muon, known to need fewer tokens than AdamW; embeddings, norms,
convolutions and what is not a layer by AdamW. The learning rate is warmed up, held, and then let down to
zero over the last two fifths, so that the end can be moved while it runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F

from recipes.pocket import weights
from recipes.pocket.batches import Batch, stream
from recipes.pocket.eyes import teach_eyes
from recipes.pocket.model import new_model
from recipes.pocket.muon import Muon
from recipes.pocket.synthesize import Phase

_WARM_UP = 80
_CHECKPOINT_EVERY = 200
_LOG_EVERY = 20


@dataclass(frozen=True)
class Plan:
    """How long to train and on what."""

    steps: int = 10000
    batch_tokens: int = 2048
    muon_rate: float = 5e-3
    adam_rate: float = 2.5e-3
    mixed_from: float = 0.18
    """Share of the steps after which the mixture is `mixed`."""
    long_from: float = 0.6
    words_only: bool = False
    """All steps on the mixture `words`, for a model that goes on from another."""
    rate: float = 1.0
    """Of the rates above. Full rates unlearn copying in a model that goes on."""
    decay_share: float = 0.4
    """Of the steps, at the end, over which the rates fall to zero."""
    eyes_steps: int = 1400
    """Of the vision tower alone, after the others."""
    eyes_rate: float = 0.6
    """Of the rates above, meanwhile."""
    threads: int = 2


def train(folder: Path, tokenizer: Any, seed: int, plan: Plan, start: Path | None = None) -> Any:
    """Train, or go on from the checkpoint in `folder`, and return the model.

    `start`: a model folder whose weights it begins with, its vision tower included.
    """
    torch.set_num_threads(plan.threads)
    log = (folder / "train.log").open("a", encoding="utf-8")
    model = new_model(tokenizer.get_vocab(), seed)
    optimizers = _optimizers(model, plan)
    done = _resume(folder / "checkpoint.pt", model, optimizers)
    if not done:
        if start is not None:
            load(model, start)
        else:
            teach_eyes(model.model.visual, model.config.text_config.hidden_size, seed, log)
    model.train()
    phase: Phase | None = None
    started, seen, losses = time.monotonic(), 0, 0.0
    for step in range(done, plan.steps):
        if _phase(step, plan) != phase:
            phase = _phase(step, plan)
            batches = stream(tokenizer, phase, plan.batch_tokens, _longest(phase), f"{seed} {phase} {step}")
        batch = next(batches)
        losses += _step(model, optimizers, batch, _rate(step, plan) * plan.rate, plan)
        seen += batch.ids.numel()
        if (step + 1) % _LOG_EVERY == 0:
            speed = seen / (time.monotonic() - started)
            told = f"{step + 1} {phase} loss {losses / _LOG_EVERY:.4f} {speed:.0f}/s"
            print(f"{time.strftime('%H:%M:%S')} {told}", file=log, flush=True)
            losses = 0.0
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == plan.steps:
            _save(folder / "checkpoint.pt", model, optimizers, step + 1)
    _join_eyes(model, tokenizer, seed, plan, log)
    model.eval()
    return model


def _join_eyes(model: Any, tokenizer: Any, seed: int, plan: Plan, log: TextIO) -> None:
    """Train the vision tower alone on what the text half makes of it, which stays as it is."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." in name)
    optimizers = _optimizers(model, plan)
    batches = stream(tokenizer, "pictures", plan.batch_tokens, _longest("pictures"), f"{seed} pictures")
    losses = 0.0
    for step in range(plan.eyes_steps):
        left = (plan.eyes_steps - step) / (plan.eyes_steps * plan.decay_share)
        rate = plan.eyes_rate * min(1.0, (step + 1) / _WARM_UP, max(0.02, left))
        losses += _step(model, optimizers, next(batches), rate, plan)
        if (step + 1) % _LOG_EVERY == 0:
            print(f"pictures {step + 1} loss {losses / _LOG_EVERY:.4f}", file=log, flush=True)
            losses = 0.0


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """The last layer's output. The padding is on the right, where a causal model cannot see it."""
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


def _step(model: Any, optimizers: list[Any], batch: Batch, rate: float, plan: Plan) -> float:
    rows, columns = batch.learnt
    hidden = hidden_states(model, batch)[rows, columns - 1]
    logits = model.lm_head(hidden)
    loss = F.cross_entropy(logits, batch.ids[rows, columns])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, full in zip(optimizers, (plan.muon_rate, plan.adam_rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = full * rate
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _optimizers(model: Any, plan: Plan) -> list[Any]:
    muon, adam = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layered = any(part in name for part in (".language_model.layers.", ".visual.blocks.", ".merger."))
        # A patch of one colour is the same number 512 times. A step that is orthogonal does not let that one
        # direction drown all shapes.
        is_matrix = (parameter.ndim == 2 and layered) or (parameter.ndim > 2 and "patch_embed" in name)
        (muon if is_matrix else adam).append(parameter)
    return [
        Muon([{"params": muon}], rate=plan.muon_rate, decay=0.02),
        torch.optim.AdamW(adam, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]


def _rate(step: int, plan: Plan) -> float:
    left = (plan.steps - step) / (plan.steps * plan.decay_share)
    return min(1.0, (step + 1) / _WARM_UP, max(0.02, (1 - math.cos(math.pi * min(1.0, left))) / 2))


def _phase(step: int, plan: Plan) -> Phase:
    if plan.words_only:
        return "words"
    if step < plan.mixed_from * plan.steps:
        return "short"
    return "mixed" if step < plan.long_from * plan.steps else "long"


def _longest(phase: Phase) -> int:
    return {"short": 192, "mixed": 448, "long": 1024, "words": 1024, "pictures": 448}[phase]


def load(model: Any, folder: Path) -> None:
    """Begin with the weights in `folder`, of a model as large or smaller.

    What it has more of, layers and neurons between, adds nothing at first: their output weights are zero. So
    a grown model answers as the small one did, until it is trained.
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
