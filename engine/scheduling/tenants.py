"""What the tenants on a worker hold and are owed: what fairness inside a plan depends on."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class TenantShares:
    """Slots by tenant, and which tenants are ahead of others who wait."""

    num_kept_slots: int
    """Slots that only tenants with no more than these may take."""
    num_slots: Counter[str] = field(default_factory=Counter)
    """Held, by tenant."""
    surplus_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the machine that a tenant is ahead, of those that are; see `recent_use`."""

    def take_slot(self, tenant: str) -> None:
        """One more of its sequences runs."""
        self.num_slots[tenant] += 1

    def give_back_slot(self, tenant: str) -> None:
        """One of its sequences runs no more."""
        self.num_slots[tenant] -= 1
        if self.num_slots[tenant] == 0:
            del self.num_slots[tenant]

    def is_ahead(self, tenants: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the hashed names are those of tenants that are ahead."""
        if not self.surplus_s:
            return np.zeros(len(tenants), dtype=bool)
        return np.isin(tenants, hashed(self.surplus_s))


def hashed(tenants: Iterable[str]) -> NDArray[np.int64]:
    """Names as numbers for a column; two that happen to collide are taken for one another."""
    return np.array([hash(tenant) for tenant in tenants], dtype=np.int64)
