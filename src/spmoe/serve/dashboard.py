"""The dashboard: a static page, and the figures that it polls.

Figures are differences of counters between two samples. A poll takes a sample unless there is a new one, so that any
number of pages share the samples, and nothing is sampled while no page is open.
"""

from __future__ import annotations

import hashlib
import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmoe import __version__
from spmoe.engine.engine import Engine
from spmoe.observe.expert_uses import UseCounts
from spmoe.observe.ledger import Counters
from spmoe.serve.service import Service

WINDOW_SECONDS = 5.0  # rates are of the last so many seconds, once a page is open for so long
_MIN_INTERVAL = 0.5  # seconds between two samples
_MAX_SAMPLE_AGE = 30.0  # seconds; rates over longer times are not live any more
_MAX_LISTED = 100  # requests in the data; the others are only counted
_RESIDENT = 128  # bit of an expert's byte
_MOST_USED = 127  # value of the other bits that means 1

_PAGE = Path(__file__).parent / "static" / "dashboard.html"


def dashboard_page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers; the policy allows the page's own script and style by their hashes only."""
    page = _PAGE.read_bytes()
    policy = [
        "default-src 'none'",
        f"script-src {_hash_source(page, b'script')}",
        f"style-src {_hash_source(page, b'style')}",
        "connect-src 'self'",
        "img-src data:",  # an empty icon, so that browsers ask for none
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page, headers


def _hash_source(page: bytes, tag: bytes) -> str:
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content).digest()).decode()}'"


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of the server and the engine at one time."""

    time: float  # seconds
    generated: int  # tokens that clients were sent
    counters: Counters
    experts: UseCounts


class Dashboard:
    """Computes the data of the dashboard."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._started = clock()
        self._samples: deque[Sample] = deque()  # the newest last

    def data(self) -> dict[str, Any]:
        """Return all figures as JSON values; None: not known, or nothing has happened lately."""
        service, engine = self._service, self._service.llm.llm.engine
        newest = self._sample(engine)
        oldest = self._samples[0]
        seconds, total = newest.time - oldest.time, newest.counters
        recent = total.minus(oldest.counters)
        requests = service.requests()
        running = sum(one.running for one in requests)
        present = engine.experts.pool.present()
        return {
            "version": __version__,
            "model": service.model_name,
            "failure": service.llm.failure or ("the server is shutting down" if service.draining.is_set() else None),
            "uptime_seconds": self._clock() - self._started,
            "window_seconds": seconds,
            "tokens_per_second": (newest.generated - oldest.generated) / seconds if seconds else None,
            "ttft_seconds": service.metrics.recent_ttft.median(),
            "tpot_seconds": service.metrics.recent_tpot.median(),
            "hit_rate": {"recent": recent.hit_rate, "total": total.hit_rate},
            "link_utilisation": engine.loop.rates.busy if recent.steps else None,
            "acceptance": {
                "recent": _ratio(recent.accepted, recent.drafted),
                "total": _ratio(total.accepted, total.drafted),
            },
            "draft_tokens": {
                "recent": _ratio(recent.drafted, recent.verified),
                "total": _ratio(total.drafted, total.verified),
            },
            "slots": {"used": int(np.count_nonzero(present)), "total": engine.slots},
            "cutoff_layers": engine.prefetching.cutoff,
            "layers": len(engine.spec.experts),
            "kv_usage": engine.target.kv_pool.usage,
            "running": running,
            "waiting": len(requests) - running,
            "requests": [asdict(one) for one in requests[:_MAX_LISTED]],
            "totals": {"generated_tokens": newest.generated, "steps": total.steps, "routed_experts": total.asked},
            "experts": expert_rows(engine.spec.experts, present, use_shares(oldest.experts, newest.experts)),
        }

    def _sample(self, engine: Engine) -> Sample:
        """Return the newest sample, taken now if the last one is not new; forget samples that are too old."""
        now, samples = self._clock(), self._samples
        if not samples or now - samples[-1].time >= _MIN_INTERVAL:
            generated = self._service.metrics.generated
            samples.append(Sample(now, generated, engine.counters, engine.experts.uses.snapshot()))
        # keep one sample from before the window, for clients that poll less often
        while len(samples) > 1 and (now - samples[1].time >= WINDOW_SECONDS or now - samples[0].time > _MAX_SAMPLE_AGE):
            samples.popleft()
        return samples[-1]


def use_shares(before: UseCounts, after: UseCounts) -> np.ndarray:
    """Return the share of each layer's forwards between two snapshots that were routed to each expert."""
    # -> float [layers, experts]
    forwards = np.maximum(after.forwards - before.forwards, 1)[:, None]  # a layer that did not run has no uses
    shares: np.ndarray = np.minimum(1.0, (after.uses - before.uses) / forwards)
    return shares


def expert_rows(experts_per_layer: tuple[int, ...], present: np.ndarray, shares: np.ndarray) -> list[str]:
    """Return one base64 text per layer, of one byte per expert: 128 if it has a slot, plus 0 to 127 for its use.

    An expert that was used at all has at least 1.
    """
    # present: bool [layers, experts]; shares: float [layers, experts]
    values = (np.ceil(shares * _MOST_USED) + _RESIDENT * present).astype(np.uint8)
    return [b64encode(row[:count].tobytes()).decode() for row, count in zip(values, experts_per_layer, strict=True)]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
