"""Counters of a run: tokens, expert loads, bytes moved, stalls. `Ledger` is their only writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from operator import is_
from typing import Any, Self


@dataclass(slots=True)
class Counters:
    """Running totals. Subtract two snapshots to get the counts between them."""

    # steps
    steps: int = 0
    tokens: int = 0  # new tokens
    drafted: int = 0  # draft tokens
    accepted: int = 0  # draft tokens that the target accepted
    drafted_at: list[int] = field(default_factory=list)  # draft tokens by position in the draft
    accepted_at: list[int] = field(default_factory=list)  # accepted draft tokens by position in the draft
    verified: int = 0  # steps that had a draft
    missing: int = 0  # in those steps, routed experts that were in no slot when the step began
    # routed experts, once per layer and forward: routed = hits + late + demand_loads + cpu_experts
    hits: int = 0  # READY when routed to
    late: int = 0  # LOADING when routed to
    demand_loads: int = 0  # ABSENT when routed to
    demand_bytes: int = 0
    cpu_experts: int = 0  # ABSENT when routed to, and computed on the CPU instead
    cpu_bytes: int = 0
    # prefetched experts: issued = used + wasted + failed + held
    prefetch_loads: int = 0
    issued_bytes: int = 0
    prefetch_used: int = 0
    used_bytes: int = 0
    late_bytes: int = 0  # part of used_bytes: still LOADING when routed to
    wasted_bytes: int = 0  # evicted before use
    failed_bytes: int = 0
    # prefetch requests, and the ones that moved no bytes
    prefetches_requested: int = 0
    prefetches_resident: int = 0  # already in a slot
    prefetches_stale: int = 0  # dropped: the layer or the step had passed
    prefetches_over_budget: int = 0  # dropped: the step's byte budget was spent
    # time
    stall_seconds: float = 0.0  # compute waited for experts
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    # the CPU path
    cpu_seconds: float = 0.0  # the CPU computed experts
    cpu_wait_seconds: float = 0.0  # the host waited for them; the device may have waited for copies meanwhile
    cpu_copies: int = 0  # experts that were copied into a layout that the CPU computes faster
    cpu_copy_seconds: float = 0.0  # that this took; not part of cpu_seconds
    cpu_failures: int = 0  # experts that the CPU failed to compute; they were loaded
    path_choices: int = 0  # layers whose missing experts were divided between link and CPU, and judged later
    wrong_path_choices: int = 0  # of these, another division would have finished earlier, by later times
    timed_bytes: int = 0  # of copies whose time was measured
    timed_seconds: float = 0.0

    def copy(self) -> Self:
        """Return a snapshot."""
        return replace(self, drafted_at=[*self.drafted_at], accepted_at=[*self.accepted_at])

    def minus(self, earlier: Counters) -> Self:
        """Return the counts since the snapshot `earlier`."""
        return self._combine(earlier, -1)

    def plus(self, other: Counters) -> Self:
        """Return the sum of both."""
        return self._combine(other, 1)

    def add(self, other: Counters) -> None:
        """Add other counts to these."""
        total = self.plus(other)
        for f in fields(self):
            setattr(self, f.name, getattr(total, f.name))

    def shares(self, count: int, first: int) -> list[Self]:
        """Divide the counts into nearly equal ones that add up to these; `first` gets the first of the remainders."""
        order = [(first + number) % count for number in range(count)]
        result = [type(self)() for _ in order]
        for f in fields(self):
            value = getattr(self, f.name)
            for rank, number in enumerate(order):
                if isinstance(value, list):
                    share: Any = [one // count + (rank < one % count) for one in value]
                else:
                    share = value / count if isinstance(value, float) else value // count + (rank < value % count)
                setattr(result[number], f.name, share)
        return result

    def _combine(self, other: Counters, sign: int) -> Self:
        result = type(self)()
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if isinstance(a, list):
                setattr(result, f.name, [x + sign * y for x, y in zip_longest(a, b, fillvalue=0)])
            else:
                setattr(result, f.name, a + sign * b)
        return result

    def count_draft(self, drafted: int, accepted: int, missing: int = 0) -> None:
        """Add one draft of `drafted` tokens of which the first `accepted` were accepted."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.verified += 1
            self.missing += missing
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    @property
    def asked(self) -> int:
        """Routed experts."""
        return self.hits + self.late + self.demand_loads + self.cpu_experts

    @property
    def cpu_gbps(self) -> float | None:
        """Rate at which the CPU computed experts, in gigabytes of stored weights per second; None if it did not."""
        return self.cpu_bytes / self.cpu_seconds / 1e9 if self.cpu_seconds else None

    @property
    def link_gbps(self) -> float | None:
        """Rate of the copies whose time was measured, in gigabytes per second; None if none was."""
        return self.timed_bytes / self.timed_seconds / 1e9 if self.timed_seconds else None

    @property
    def hit_rate(self) -> float | None:
        """Share of routed experts that were READY; None if no expert was routed to."""
        return self.hits / self.asked if self.asked else None

    @property
    def loads(self) -> int:
        """Experts copied into slots, on demand or ahead of it."""
        return self.demand_loads + self.prefetch_loads

    @property
    def useful_loads(self) -> int:
        """Experts copied into slots and used."""
        return self.demand_loads + self.prefetch_used

    @property
    def missed(self) -> int:
        """Routed experts that were in no slot when their step began: loaded and used, or computed on the CPU."""
        return self.useful_loads + self.cpu_experts

    @property
    def held_bytes(self) -> int:
        """Bytes of prefetched experts that are in slots or in flight, neither used nor evicted yet."""
        return self.issued_bytes - self.used_bytes - self.wasted_bytes - self.failed_bytes

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step that had a draft: the accepted ones and the target's own; None if nothing was drafted."""
        drafts = self.drafted_at[0] if self.drafted_at else 0
        return 1 + self.accepted / drafts if drafts else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts of at least i+1 tokens whose first i+1 tokens were accepted, for every i."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True) if d]


class Ledger:
    """Owner and only writer of `counters`: one method per event, bytes derived from `blob_bytes`.

    Every event belongs to the accounts of the requests whose step began last, in equal shares; what `step` counts
    belongs to one request alone. So accounts add up to the totals. They are brought up to date only when others are
    charged, so that counting costs nothing more. Callers of the events hold `lock`, the expert pool's; `stalled`,
    `step`, events of the CPU path and the methods that read take it themselves.
    """

    def __init__(self, blob_bytes: int, lock: threading.RLock | None = None) -> None:
        self.counters = Counters()  # totals of all requests, and of work between them
        self._blob_bytes = blob_bytes
        self._lock = lock or threading.RLock()
        self._accounts: list[Counters] = []  # of the requests whose step runs or ran last
        self._charged_from = Counters()  # totals that the accounts have, or that were there before they were charged
        self._settled = 0  # times; another account gets the remainder each time

    # ---- accounts

    def charge(self, *accounts: Counters) -> None:
        """Count all further events for these accounts too, which the ledger alone writes."""
        if len(accounts) == len(self._accounts) and all(map(is_, accounts, self._accounts)):
            return
        with self._lock:
            self._settle()
            self._accounts = list(accounts)

    def close_account(self, account: Counters) -> None:
        """Count no further events for this account."""
        if self._is_charged(account):
            self.charge(*(one for one in self._accounts if one is not account))

    def snapshot(self, account: Counters | None = None) -> Counters:
        """Return a copy of an account with all counts so far; without one, of the totals."""
        with self._lock:
            if account is None:
                return self.counters.copy()
            if self._is_charged(account):
                self._settle()
            return account.copy()

    @property
    def held_bytes(self) -> int:
        """Bytes of prefetched experts that wait for their use; cheaper than a snapshot."""
        with self._lock:
            return self.counters.held_bytes

    def _is_charged(self, account: Counters) -> bool:
        return any(one is account for one in self._accounts)

    def _settle(self) -> None:
        """Add the events since the last call to the charged accounts."""
        now, count = self.counters.copy(), len(self._accounts)
        if count:
            new = now.minus(self._charged_from)
            for account, share in zip(self._accounts, new.shares(count, self._settled % count), strict=True):
                account.add(share)
        self._charged_from = now
        self._settled += 1

    # ---- routed experts, at the moment a layer needs them

    def hit(self, count: int) -> None:
        """Count routed experts that were READY."""
        self.counters.hits += count

    def late(self, count: int) -> None:
        """Count routed experts that were LOADING."""
        self.counters.late += count

    def demanded(self, count: int) -> None:
        """Count routed experts that were ABSENT and are loaded on demand."""
        self.counters.demand_loads += count
        self.counters.demand_bytes += count * self._blob_bytes

    # ---- the CPU path

    def computed(self, seconds: float) -> None:
        """Count a routed expert that was ABSENT and that the CPU has computed in so many seconds."""
        with self._lock:
            self.counters.cpu_experts += 1
            self.counters.cpu_bytes += self._blob_bytes
            self.counters.cpu_seconds += seconds

    def expert_copied(self, seconds: float) -> None:
        """Count an expert that was copied, in so many seconds, into a layout that the CPU computes faster."""
        with self._lock:
            self.counters.cpu_copies += 1
            self.counters.cpu_copy_seconds += seconds

    def waited_for_cpu(self, seconds: float) -> None:
        """Add time that the host waited for experts on the CPU."""
        with self._lock:
            self.counters.cpu_wait_seconds += seconds

    def computing_failed(self, count: int) -> None:
        """Count experts that the CPU has failed to compute."""
        with self._lock:
            self.counters.cpu_failures += count

    def path_chosen(self, wrong: bool) -> None:
        """Count a choice between link and CPU, once it is known whether another one would have been better."""
        with self._lock:
            self.counters.path_choices += 1
            self.counters.wrong_path_choices += wrong

    def timed_copies(self, nbytes: int, seconds: float) -> None:
        """Count copies whose time was measured."""
        with self._lock:
            self.counters.timed_bytes += nbytes
            self.counters.timed_seconds += seconds

    # ---- prefetch requests

    def requested(self, count: int) -> None:
        """Count prefetch requests of a policy."""
        self.counters.prefetches_requested += count

    def resident(self, count: int) -> None:
        """Count prefetch requests for experts that already have a slot."""
        self.counters.prefetches_resident += count

    def stale(self, count: int) -> None:
        """Count prefetch requests that were dropped because their layer or their step had passed."""
        self.counters.prefetches_stale += count

    def over_budget(self, count: int) -> None:
        """Count prefetch requests that were dropped because the step's byte budget was spent."""
        self.counters.prefetches_over_budget += count

    # ---- prefetched experts: each is issued once and then used, wasted or failed once

    def prefetch_issued(self) -> None:
        """Count a prefetched expert whose slot was reserved and whose copy is about to start."""
        self.counters.prefetch_loads += 1
        self.counters.issued_bytes += self._blob_bytes

    def prefetch_used(self, *, late: bool = False) -> None:
        """Count a prefetched expert at its first use; `late`: it was still LOADING."""
        self.counters.prefetch_used += 1
        self.counters.used_bytes += self._blob_bytes
        self.counters.late_bytes += late * self._blob_bytes

    def prefetch_wasted(self) -> None:
        """Count a prefetched expert that was evicted before use."""
        self.counters.wasted_bytes += self._blob_bytes

    def prefetch_failed(self) -> None:
        """Count a prefetched expert whose copy failed before use."""
        self.counters.failed_bytes += self._blob_bytes

    def prefetch_lost(self) -> None:
        """Count every prefetched expert that was not used yet as failed: the slots are forgotten."""
        self.counters.failed_bytes += self.counters.held_bytes

    # ---- time and steps

    def stalled(self, seconds: float) -> None:
        """Add time that compute waited for experts."""
        with self._lock:
            self.counters.stall_seconds += seconds

    def step(
        self,
        account: Counters | None = None,
        *,
        tokens: int,
        drafted: int = 0,
        accepted: int = 0,
        missing: int = 0,
        draft_seconds: float = 0.0,
        verify_seconds: float = 0.0,
    ) -> None:
        """Count one step of a request: `tokens` new ones, `missing` routed experts that were in no slot before."""
        with self._lock:
            # of an account, these counts are settled at once
            written = [self.counters] if account is None else [self.counters, self._charged_from, account]
            for counters in written:
                counters.steps += 1
                counters.tokens += tokens
                counters.count_draft(drafted, accepted, missing)
                counters.draft_seconds += draft_seconds
                counters.verify_seconds += verify_seconds

    @contextmanager
    def ignore_demand(self) -> Iterator[None]:
        """Leave hits, late and demand loads and stalls inside the block out, for filling slots between requests.

        Prefetched experts that are used or evicted inside still count: they are held no longer.
        """
        names = ("hits", "late", "demand_loads", "demand_bytes", "stall_seconds")
        before = {name: getattr(self.counters, name) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.counters, name, value)
