"""Orders to reload: which children they mean, one after another, and what runs in their places. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from deploy.supervisor.child import Child
from deploy.supervisor.children import other_name
from deploy.supervisor.events import ReloadAsked


class Order(Struct, frozen=True, omit_defaults=True):
    """Reload the model with this name; None: every one that runs. `swap_for`: another model, by its id or
    folder, is to be served under that name from now on."""

    model: str | None = None
    swap_for: str | None = None


@dataclass(frozen=True, slots=True)
class Reloading:
    """How workers are reloaded, by orders that come to the socket at `path`.

    `drain_timeout_s`: what one needs to end its requests. `fits`: whether so many bytes find room beside what
    is there.
    """

    path: Path
    drain_timeout_s: float
    ready_timeout_s: float
    fits: Callable[[int], bool]


class Reloads:
    """Owns what each child is: `programs`, by both of its names. At most one order is open."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.programs = {name: child for child in children for name in (child.name, other_name(child.name))}
        self._first = dict(self.programs)
        """By which each child began: its first plan, until another model takes its place."""
        self._models = [child.name for child in children if child.model is not None]
        self.swap_for: str | None = None
        """The model that is to run in the place of the next child's; None: the same as before."""
        self._before = self._after = children[0]
        """What runs in the place of the child whose turn it is, if it fails and if it succeeds."""
        self._to_come: list[str] = []
        self._texts: list[str] = []

    def begin(self, order: Order, running: Sequence[str]) -> str | None:
        """Take an order; `running`: the children that do. Why it cannot be carried out, or None."""
        if order.model is not None:
            named = [name for name in self._models if self._is_called(name, order.model)]
        else:
            named = [name for name in self._models if name in running] or self._models[:1]
        if not named:
            names = dict.fromkeys(child.model.name for child in self._children() if child.model)
            known = ", ".join(names)
            return f"there is no model {order.model}; there are: {known}"
        several = len({child.model.name for child in self._children() if child.model}) > 1
        if order.swap_for is not None and several and order.model is None:
            return "which model is to be replaced? Say --model NAME"
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

    def ask(self, name: str, *, runs: bool, beside: bool) -> ReloadAsked:
        """For the child whose turn it is; `name`: the one of its two names that it bears just now."""
        self._before, self._after = self.programs[name], self.successor(name)
        self.programs[other_name(name)] = self._after
        if not (runs and beside):
            self.programs[name] = self._after
        swap = self._after.model != self._before.model
        return ReloadAsked(name, beside, swap=swap, plans=self._after.plans)

    def successor(self, name: str) -> Child:
        """What a reload brings: another model, if one was named; else the first plan."""
        if self.swap_for is not None:
            return self.programs[name].swapped(self.swap_for)
        return self._first[name]

    def fall(self, child: str) -> None:
        """It is run by its next plan from now on."""
        plan = self.programs[child].fallback
        assert plan is not None, "it has one"
        self.programs[child] = self.programs[other_name(child)] = plan

    def ended(self, done: bool, text: str) -> tuple[bool, str] | None:
        """What became of the child whose turn it was. The answer to the order, unless more are to come."""
        name, *self._to_come = self._to_come
        self.programs[name] = self.programs[other_name(name)] = self._after if done else self._before
        if done:
            self._first[name] = self._first[other_name(name)] = self._after
        self._texts.append(text)
        if done and self._to_come:
            return None
        self._to_come = []
        return done, "\n".join(self._texts)
