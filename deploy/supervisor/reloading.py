"""Reload orders: the children that each concerns, one after another, and their replacements. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from deploy.supervisor.child import Child
from deploy.supervisor.children import other_name
from deploy.supervisor.events import ReloadAsked, Reloaded
from protocol.supervisor_messages import ReadyWorker


class ReloadOrder(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Order to reload the model of this name; None: every running one. `swap_for`: another model, by id or
    folder, to be served under that name from now on. `gateway`: reload the gateway instead.

    A field of a later version is refused: without it, the order would mean something else."""

    model: str | None = None
    swap_for: str | None = None
    gateway: bool = False


@dataclass(frozen=True, slots=True)
class Reloading:
    """Settings of reloads, which are ordered through the control socket at `path`.

    `drain_timeout_s`: the time that gateway and workers have to finish their requests. `fits`: whether that
    many bytes fit beside what is loaded. `read_again`: returns the children with the settings as they are
    now. It raises `ValueError` or `OSError`.
    """

    path: Path
    drain_timeout_s: float
    ready_timeout_s: float
    fits: Callable[[int], bool]
    read_again: Callable[[], Sequence[Child]] = list


def _content(child: Child) -> tuple[str | None, bool] | None:
    """Return the model of a worker, and whether a fallback plan serves it: what else differs is settings."""
    return None if child.model is None else (child.model.model, "stands_in" in child.model.settings)


class Reloads:
    """The open reload order, at most one, and the current program of each child by both of its names."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.programs = {name: child for child in children for name in (child.name, other_name(child.name))}
        self._first = dict(self.programs)
        """Each child's first plan, until another model replaces it."""
        self._swapped: dict[str, str] = {}
        """The models that orders have put in the place of those of the settings, by child."""
        self._models = [child.name for child in children if child.model is not None]
        self._gateways = [child.name for child in children if child.hears]
        self.swap_for: str | None = None
        """The model that replaces the next child's; None: the same model."""
        self._before = self._after = children[0]
        """The program of the child whose turn it is, if its reload fails and if it succeeds."""
        self._replaced: ReadyWorker | None = None
        """Its process before the reload; None: unknown."""
        self._to_come: list[str] = []
        self._texts: list[str] = []

    def refresh(self, children: Sequence[Child], running: Sequence[str]) -> None:
        """Use new settings at the next reload of each child, and for workers that do not run at their next
        start. `running`: the running workers. A model that is new, or has a new name, is left out."""
        for child in children:
            known = self._first.get(child.name)
            if known is None or (known.model and known.model.name) != (child.model and child.model.name):
                continue
            model = self._swapped.get(child.name)
            first = child if model is None else child.swapped(model)
            names = child.name, other_name(child.name)
            is_first = self.programs[child.name].plans == known.plans
            self._first |= dict.fromkeys(names, first)
            if child.model is not None and child.name not in running and is_first:
                self.programs |= dict.fromkeys(names, first)

    def begin(self, order: ReloadOrder, running: Sequence[str]) -> str | None:
        """Accept an order, or return why it is refused. `running`: the running children."""
        if order.gateway:
            named = self._gateways
            if not named:
                return "there is no gateway here"
        elif order.model is not None:
            named = [name for name in self._models if self._is_called(name, order.model)]
        else:
            named = [name for name in self._models if name in running] or self._models[:1]
        if not named:
            names = dict.fromkeys(child.model.name for child in self._children() if child.model)
            known = ", ".join(names)
            return f"there is no model {order.model}; the models are: {known}"
        several = len({child.model.name for child in self._children() if child.model}) > 1
        if order.swap_for is not None and several and order.model is None:
            return "name the model to replace: --model NAME"
        self.swap_for = order.swap_for
        self._to_come, self._texts = named, []
        return None

    def _children(self) -> list[Child]:
        return [self.programs[name] for name in self._models]

    def _is_called(self, name: str, model: str) -> bool:
        served = self.programs[name].model
        return served is not None and model in (served.name, *served.aliases)

    @property
    def next(self) -> str:
        """The child whose turn it is."""
        return self._to_come[0]

    def ask(self, name: str, *, runs: bool, beside: bool, worker: ReadyWorker | None = None) -> ReloadAsked:
        """Return the event for the child whose turn it is. `name`: its current one of its two names.
        `worker`: its process, if it is ready."""
        self._replaced = worker
        self._before, self._after = self.programs[name], self.successor(name)
        self.programs[other_name(name)] = self._after
        if not (runs and beside):
            self.programs[name] = self._after
        swap = _content(self._after) != _content(self._before)
        return ReloadAsked(name, beside, swap=swap, plans=self._after.plans)

    def successor(self, name: str) -> Child:
        """Return the program after a reload: with the model to swap for, if any, else the first plan."""
        if self.swap_for is None:
            return self._first[name]
        first, now = self._first[name], self.programs[name]
        return (first if now.plans == first.plans else now).swapped(self.swap_for)

    def is_other(self, worker: ReadyWorker | None) -> bool:
        """Return whether a worker has other content than the process that is replaced."""
        if worker is None or self._replaced is None:
            return False
        old, new = self._replaced.identity, worker.identity
        return bool(old and new) and old != new

    def checked(self, done: bool, text: str, workers: Mapping[int, ReadyWorker], pid: int | None) -> Reloaded:
        """Return the result of one child's reload, as `workers` confirm it. `pid`: of its new process; None:
        none runs."""
        model = self._after.model
        if not done or model is None or pid is None or not workers:
            return Reloaded(done, text)
        # The gateway may not have seen the old process end yet.
        going = None if self._replaced is None else self._replaced.pid
        if all(worker.model != model.name for of, worker in workers.items() if of != going):
            served = f"it serves {workers[pid].model}" if pid in workers else "it has gone again"
            return Reloaded(False, f"{text}, but {model.name} is not served: {served}")
        if self.swap_for is None and self.is_other(workers.get(pid)):
            text += "; its files or KV settings have changed, so it continued no request of the old process"
        return Reloaded(True, text)

    def fall(self, child: str) -> None:
        """Switch `child` to its next plan."""
        plan = self.programs[child].fallback
        assert plan is not None, "it has one"
        self.programs[child] = self.programs[other_name(child)] = plan

    def ended(self, done: bool, text: str) -> tuple[bool, str] | None:
        """Record the result of one child's reload. Return the answer to the order, or None if more follow."""
        name, *self._to_come = self._to_come
        self.programs[name] = self.programs[other_name(name)] = self._after if done else self._before
        if done:
            self._first[name] = self._first[other_name(name)] = self._after
            if self.swap_for is not None:
                self._swapped[name] = self.swap_for
        self._texts.append(text)
        if done and self._to_come:
            return None
        self._to_come = []
        return done, "\n".join(self._texts)
