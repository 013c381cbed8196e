"""Load a server for minutes: many clients, mixed lengths, cancellations and bad requests. Prints one line of figures.

    python tests/serve_load.py --minutes 10 --clients 100

The server is `spmoe serve` in a process of its own, with the shipped pair in float32. Greedy text must be that of the
same request alone, sampled text that of its seed. At the end no request may run, and the process may have neither more
descriptors nor much more memory than after its first requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("def add(a, b):", "class Stack:", "import os\n", "for i in range(10):\n", "# sort a list\n" * 8, "x = 1")
LENGTHS = (1, 4, 16, 48)
BAD: tuple[Any, ...] = (
    {"prompt": ""},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "unknown": 1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": ["x", 1]},
    [],
)
GROWTH = 300 * 2**20  # bytes of memory that the server may take more


def bodies() -> list[dict[str, Any]]:
    """Return the requests whose text is known."""
    greedy = [{"prompt": prompt, "max_tokens": count} for prompt in PROMPTS for count in LENGTHS]
    sampled = [{**one, "temperature": 0.8, "seed": number} for number, one in enumerate(greedy)]
    return [{**one, "ignore_eos": True} for one in (*greedy, *sampled)]


class Load:
    """Clients of one server, and what they have seen."""

    def __init__(self, url: str, client: httpx.AsyncClient, texts: list[str], seen: Counter[str]) -> None:
        self.seen = seen
        self._url = f"{url}/v1/completions"
        self._client = client
        self._bodies = bodies()
        self._texts = texts  # of these bodies

    async def learn_texts(self) -> None:
        """Ask for every text alone."""
        for body in self._bodies:
            self._texts.append(await self._text(body))

    async def run(self, seed: int, until: float) -> None:
        """Send requests until this time."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            action = rng.choices((self._complete, self._stream, self._leave, self._bad), (5, 5, 3, 2))[0]
            try:
                await action(rng)
            except httpx.HTTPError as error:
                self.seen[f"error: {type(error).__name__}"] += 1

    async def _text(self, body: dict[str, Any]) -> str:
        answer = await self._client.post(self._url, json=body)
        while answer.status_code == 429:
            self.seen["429"] += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            answer = await self._client.post(self._url, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _check(self, number: int, text: str, kind: str) -> None:
        right = text == self._texts[number]
        self.seen[kind if right else "wrong text"] += 1
        if not right:
            print(f"wrong text of {self._bodies[number]}: {text!r}, not {self._texts[number]!r}", file=sys.stderr)

    async def _complete(self, rng: random.Random) -> None:
        number = rng.randrange(len(self._bodies))
        self._check(number, await self._text(self._bodies[number]), "completions")

    async def _stream(self, rng: random.Random) -> None:
        number = rng.randrange(len(self._bodies))
        body = {**self._bodies[number], "stream": True}
        async with self._client.stream("POST", self._url, json=body) as answer:
            if answer.status_code == 429:
                self.seen["429"] += 1
                await asyncio.sleep(1)
                return
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        self._check(number, "".join(event_text(line) for line in lines), "streams")

    async def _leave(self, rng: random.Random) -> None:
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.5}
        try:
            await asyncio.wait_for(self._client.post(self._url, json=body), rng.uniform(0.01, 2.0))
        except TimeoutError:
            self.seen["left"] += 1

    async def _bad(self, rng: random.Random) -> None:
        answer = await self._client.post(self._url, json=rng.choice(BAD))
        self.seen["refused" if 400 <= answer.status_code < 500 else f"status {answer.status_code}"] += 1


def event_text(line: str) -> str:
    """Return the text of one event of a stream."""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return str(choices[0]["text"]) if choices else ""


def usage(pid: int) -> tuple[int, int]:
    """Return a process's memory in bytes, and its open descriptors."""
    process = Path("/proc", str(pid))
    pages = int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list((process / "fd").iterdir()))


async def settle(url: str, pid: int) -> tuple[float, int, int]:
    """Wait until no request runs; return the number of those that do, and the usage without connections."""
    for _ in range(100):
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{url}/metrics")).text
        busy = sum(float(value) for value in re.findall(r"num_requests_(?:running|waiting)\{.*\} (\S+)", metrics))
        if not busy:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)  # until the server has closed its connections
    return (busy, *usage(pid))


async def load(url: str, pid: int, clients: int, seconds: float) -> int:
    """Run all clients, first for a short time; return an exit code."""
    seen: Counter[str] = Counter()
    texts: list[str] = []
    for first_seed, duration in ((0, min(20.0, seconds)), (1000, seconds)):
        limits = httpx.Limits(max_connections=2 * clients)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            runner = Load(url, client, texts, seen)
            if not texts:
                await runner.learn_texts()
            end = time.monotonic() + duration
            await asyncio.gather(*(runner.run(first_seed + number, end) for number in range(clients)))
        if not first_seed:
            _, *before = await settle(url, pid)
    busy, *after = await settle(url, pid)
    print(
        f"{dict(seen)}; still busy: {busy:g}; memory {before[0] >> 20} to {after[0] >> 20} MiB, descriptors "
        f"{before[1]} to {after[1]}"
    )
    wrong = [kind for kind in seen if kind == "wrong text" or kind.startswith(("error", "status"))]
    return int(bool(wrong or busy or after[0] - before[0] > GROWTH or after[1] > before[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    command = [sys.executable, "-m", "spmoe", "serve", "--port", "0", "--dtype", "float32", "--device", options.device]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[^/ ]+", line)))
        code = asyncio.run(load(url, server.pid, options.clients, 60 * options.minutes))
        server.terminate()
        code = code or server.wait(60)
    finally:
        server.kill()
    sys.exit(code)


if __name__ == "__main__":
    main()
