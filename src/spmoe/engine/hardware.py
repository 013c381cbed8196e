"""Hardware to plan for: given by the user, measured on this machine, or assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spmoe.backends.devices import choose_device, device_facts, free_memory, link_bandwidth, memory_bandwidth
from spmoe.system.host import available_memory

ASSUMED_DEVICE_MEMORY = 24 * 2**30  # a common desktop
ASSUMED_HOST_MEMORY = 64 * 2**30
ASSUMED_LINK_GBPS = 25.0  # PCIe 4.0 x16
ASSUMED_DEVICE_GBPS = 1000.0
ASSUMED_HOST_GBPS = 60.0  # two channels of DDR5
ASSUMED_DISK_GBPS = 3.0  # one NVMe disk, where the CPU reads experts from
HOST_SHARE = 0.8  # of the host's memory that a run on the CPU may take; the rest is for the page cache


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware to plan for. `sources` says of each value whether it was given, measured or assumed."""

    device: str  # "cuda" or "cpu"
    device_name: str | None  # None: the device is not here
    device_memory: int  # bytes that are free on the device; on the CPU those that the run may take
    host_memory: int  # bytes
    link_gbps: float  # to the device; on the CPU from the disk
    device_gbps: float  # memory bandwidth
    host_gbps: float  # bandwidth of the host's memory, which the link and experts on the CPU share
    sources: dict[str, str]

    @property
    def is_here(self) -> bool:
        """Whether this is the machine that the plan is made on, so that its profiles apply."""
        return self.device_name is not None and "given" not in self.sources.values()

    @property
    def limits_memory(self) -> bool:
        """Whether the device memory is a limit that the user sets on the device that is here."""
        return self.device_name is not None and self.sources["device_memory"] == "given"


def find_hardware(
    device: str,
    expert_bytes: int,
    device_memory: int | None = None,
    host_memory: int | None = None,
    link_gbps: float | None = None,
    device_gbps: float | None = None,
    host_gbps: float | None = None,
) -> Hardware:
    """Return the given hardware; values that are not given are measured here, or assumed without a CUDA device."""
    given = {
        "device_memory": device_memory,
        "host_memory": host_memory,
        "link_gbps": link_gbps,
        "device_gbps": device_gbps,
        "host_gbps": host_gbps,
    }
    found: dict[str, Any] = {}
    name: str | None = None
    if device == "cpu":
        name = "cpu"
        source = dict.fromkeys(("host_memory", "device_memory", "device_gbps", "host_gbps"), "measured")
        found["host_memory"] = available_memory()
        found["device_memory"] = round(HOST_SHARE * (host_memory or found["host_memory"]))
        found["device_gbps"] = device_gbps or memory_bandwidth(torch.device("cpu")) / 1e9
        found["link_gbps"] = ASSUMED_DISK_GBPS
        found["host_gbps"] = found["device_gbps"]  # the same memory
    elif (here := choose_device("auto")).type == "cuda":
        name, source = device_facts(here).name, dict.fromkeys(given, "measured")
        found["device_memory"], found["host_memory"] = free_memory(here), available_memory()
        found["link_gbps"] = link_gbps or link_bandwidth(here, expert_bytes) / 1e9
        found["device_gbps"] = device_gbps or memory_bandwidth(here) / 1e9
        found["host_gbps"] = host_gbps or memory_bandwidth(torch.device("cpu")) / 1e9
    else:
        source = {}
        found = {
            "device_memory": ASSUMED_DEVICE_MEMORY,
            "host_memory": ASSUMED_HOST_MEMORY,
            "link_gbps": ASSUMED_LINK_GBPS,
            "device_gbps": ASSUMED_DEVICE_GBPS,
            "host_gbps": ASSUMED_HOST_GBPS,
        }
    values: dict[str, Any] = {key: found[key] if value is None else value for key, value in given.items()}
    sources = {key: source.get(key, "assumed") if value is None else "given" for key, value in given.items()}
    return Hardware(device, name, **values, sources=sources)
