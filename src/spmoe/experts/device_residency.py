"""The contract of captured forwards that look up on the device whether the experts they need are in slots."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class DeviceResidency(Protocol):
    """Forwards on a device that look up their experts themselves; `backends/residency.py` explains the protocol."""

    table: np.ndarray  # int32 [layers, experts]: slot of each READY expert, which the device reads; -1: not READY

    def is_quiet(self, layer: int) -> bool:
        """Return whether no forward that is under way can still read an expert whose entry was set to -1 before."""
        ...

    def take_stall_seconds(self) -> float:
        """Return how long layers have waited for missing experts since the last call."""
        ...

    def abort(self) -> None:
        """End the forward that was launched and not followed, if there is one: it waits for no expert any more.

        Return when the device has left its last layer.
        """
        ...
