"""Whether weights fit into memory, and what is left beside them; what is wrong, in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.contract import ModelError, NoRoomError
from worker.models.explain import in_bytes

if TYPE_CHECKING:
    from worker.models.memory import Budget


@dataclass(frozen=True, slots=True)
class Room:
    """Of one process. `name`: of its model. `headroom`: the share that is kept free. `limit`: bytes in place
    of what the machine has. `most`: bytes it may take, whatever there is."""

    name: str
    headroom: float = 0.1
    limit: int | None = None
    most: int | None = None

    def budget(self, weight_bytes: int) -> Budget:
        """What the process may take. Raises `ModelError` if the machine can never hold the weights, and
        `NoRoomError` if it cannot just now."""
        from worker.models import memory

        most = self._within_share(memory.look().total if self.limit is None else self.limit)
        if weight_bytes > most.usable:
            raise ModelError(
                f"{self._too_large(weight_bytes, most)} Choose a smaller or more strongly quantized "
                "model: `roundhouse pull` names some that fit."
            )
        if self.limit is not None:
            return most
        budget = memory.await_room(weight_bytes, self.headroom)
        if weight_bytes > budget.usable:
            raise NoRoomError(f"{self._too_large(weight_bytes, budget)} Close other programs.")
        return self._within_share(budget.limit)

    def _within_share(self, limit: int) -> Budget:
        """What it may take of so many bytes that there are."""
        from worker.models.memory import Budget

        return Budget(min(limit, self.most or limit), self.headroom)

    def _too_large(self, weight_bytes: int, budget: Budget) -> str:
        return (
            f"{self.name}: its weights take {in_bytes(weight_bytes)}, and of {in_bytes(budget.limit)} there "
            f"may be used {in_bytes(budget.usable)}."
        )
