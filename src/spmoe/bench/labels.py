"""Labels of configurations and workloads in a report: short, and different for everything that differs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spmoe.bench.configs import ABLATIONS, ALL_ON
from spmoe.bench.results import WorkloadResults
from spmoe.bench.scenario import DEFAULT_CUTOFF
from spmoe.registry import ON_DEMAND

Row = dict[str, Any]  # a record of type "configuration"
PLAIN = "plain decoding (K=0)"
USUAL_CUTOFF = str(DEFAULT_CUTOFF)
T = TypeVar("T", bound=Hashable)


class _Policies(NamedTuple):
    """Everything that a configuration is made of, except memory budget, K and cutoff."""

    base: str
    prefetch: str
    eviction: str
    batching: bool
    overlap: bool
    named: bool  # by the scenario
    ablation: str | None

    @classmethod
    def of(cls, row: Row) -> _Policies:
        return cls(
            PLAIN if is_plain_decoding(row) else row["system"] or row["prefetch"],
            row["prefetch"],
            row["eviction"],
            row["batching"],
            row["overlap"],
            row["system"] is not None,
            row["ablation"],
        )

    @property
    def shared_name(self) -> tuple[str, str | None]:
        """Key of the configurations that have the same name unless their policies are added to it."""
        return self.base, None if self.ablation == ALL_ON else self.ablation


class Labels:
    """Labels of configurations that are shown together, as short as possible."""

    def __init__(self, rows: Sequence[Row]) -> None:
        every = list(dict.fromkeys(_Policies.of(row) for row in rows))
        self._show_evictions = len({one.eviction for one in every}) > 1 and not any(one.named for one in every)
        self._complete = {one for one in every if one.ablation is None}
        self._pairs: dict[tuple[str, str | None], set[tuple[str, str]]] = {}
        for one in every:
            self._pairs.setdefault(one.shared_name, set()).add((one.prefetch, one.eviction))
        self._policy_labels = make_distinct(every, self._name)
        systems = dict.fromkeys((_Policies.of(row), str(row["cutoff"])) for row in rows)
        self._system_labels = make_distinct(systems, lambda one: self._policy_labels[one[0]] + _cutoff_suffix(*one))

    def policies(self, row: Row) -> str:
        """Return the label of a row without its cutoff."""
        return self._policy_labels[_Policies.of(row)]

    def system(self, row: Row) -> str:
        """Return the label of a row with its cutoff, unless that is the default."""
        return self._system_labels[_Policies.of(row), str(row["cutoff"])]

    def label(self, row: Row) -> str:
        """Return the label of a row with cutoff and K: everything but its memory budget."""
        return self.system(row) if is_plain_decoding(row) else f"{self.system(row)}, K={row['num_speculative_tokens']}"

    def _name(self, one: _Policies) -> str:
        name, ambiguous = one.base, len(self._pairs[one.shared_name]) > 1
        if ambiguous and one.named:
            name += f" ({one.prefetch} / {one.eviction})"
        elif ambiguous or (self._show_evictions and one.base != PLAIN):
            name += f" / {one.eviction}"
        ablated = ABLATIONS.get(one.ablation or ALL_ON, {})  # shown by the name of the ablation
        name += ", no batching" * (not one.batching and "batching" not in ablated)
        name += ", no overlap" * (not one.overlap and "overlap" not in ablated)
        only_all_on = one.ablation == ALL_ON and one._replace(ablation=None) not in self._complete
        return name if one.ablation is None or only_all_on else f"{name}, {one.ablation}"


def is_plain_decoding(row: Row) -> bool:
    """Return whether a row neither speculates nor prefetches, and has no name of its own."""
    return not row["num_speculative_tokens"] and row["prefetch"] == ON_DEMAND and row["system"] is None


def make_distinct(things: Iterable[T], name: Callable[[T], str]) -> dict[T, str]:
    """Return a name for each thing; a name that is taken gets a number."""
    found: dict[T, str] = {}
    taken: set[str] = set()
    for thing in things:
        candidate, number = name(thing), 1
        while candidate in taken:
            number += 1
            candidate = f"{name(thing)} ({number})".lstrip()
        taken.add(candidate)
        found[thing] = candidate
    return found


def _cutoff_suffix(one: _Policies, cutoff: str) -> str:
    expected = str(ABLATIONS.get(one.ablation or ALL_ON, {}).get("cutoff", USUAL_CUTOFF))
    return "" if cutoff == expected else f", cutoff {cutoff}"


def workload_names(results: Sequence[WorkloadResults]) -> list[str]:
    """Return a short name for each workload made of the fields in which they differ; empty if there is only one."""
    fields = [_fields(one.machine) for one in results]
    more = [_rarely_needed_fields(one.machine) for one in results]
    varying = [name for name in fields[0] if len({one[name] for one in fields}) > 1] if fields else []
    for name in more[0] if more else ():
        if len({tuple(one[name] for name in varying) for one in fields}) == len(fields):
            break
        if len({one[name] for one in more}) > 1:
            varying.append(name)
            for one, other in zip(fields, more, strict=True):
                one[name] = other[name]
    names = [", ".join(one[name] for name in varying if one[name]) for one in fields]
    return list(make_distinct(range(len(names)), lambda number: names[number]).values())


def model_name(machine: Row) -> str:
    """Return the shape or model of a machine record; of a local path, its last part."""
    name = str(machine["shape"] or machine["model"])
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def expert_format(machine: Row) -> str:
    """Return the format of experts, with a mark if it is lossy; empty for dense ones in the run's dtype."""
    found = machine.get("expert_format") or machine["dtype"]
    lossy = "" if machine.get("lossless", True) else " (lossless: no)"
    return f"{found}{lossy}" if lossy or found != machine["dtype"] else ""


def _fields(machine: Row) -> dict[str, str]:
    link, draft, requested = machine["link_gbps"], machine["draft"], machine.get("requested") or {}
    projection, on_cpu = requested.get("projection"), requested.get("cpu_experts")
    residency_check = requested.get("residency_check")
    return {
        "scenario": str(machine.get("scenario") or ""),
        "matrix": str(machine.get("matrix") or ""),
        "model": model_name(machine) + (" (random weights)" if machine.get("weights") == "random" else ""),
        "draft": "" if draft is None else f"draft {Path(draft).name}",
        "projection": "no projection" if projection is False else "",
        "dtype": str(machine["dtype"]),
        "format": expert_format(machine),
        "cpu": "" if on_cpu is None else f"experts on the CPU: {on_cpu}",
        "residency": "" if residency_check is None else f"residency check: {residency_check}",
        "link": "own link" if link is None else f"{link:g} GB/s",
        "eager": "eager" if machine["enforce_eager"] else "",
        "prompts": f"{machine.get('prompt_set')}",
        "output": f"{machine['output_len']} tokens",
        "device": str(machine["device"]),
    }


def _rarely_needed_fields(machine: Row) -> dict[str, str]:
    """Return fields that are added one by one, if the others are not enough."""
    return {
        "count": f"{machine['prompts']} prompts",
        "warmup": f"{machine['warmup']} warm-up runs",
        "commit": str(machine["commit"])[:10],
        "torch": f"torch {machine['torch']}",
        "transformers": f"transformers {machine['transformers']}",
        "digest": f"prompts {str(machine.get('prompt_digest'))[:8]}",
    }
