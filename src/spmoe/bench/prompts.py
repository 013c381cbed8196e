"""Prompt sets: read from files in well-known formats or from the hub, or cut from the sample text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from spmoe.errors import UsageError, reason
from spmoe.files import decode_json
from spmoe.models.shipped import sample_text

SAMPLE = "sample"
HUB_SETS = {  # name -> dataset on the hub and its file with prompts
    "humaneval": ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
    "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
}
# a record with both keys is in this format: key of the prompt -> (format, second key)
_FORMATS = {
    "prompt": ("HumanEval", "task_id"),
    "question": ("GSM8K", "answer"),
    "turns": ("MT-Bench", "question_id"),
}
_NUM_SAMPLES, _SAMPLE_LINES = 4, 20  # prompts cut from the sample text, and lines of each


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and their source."""

    name: str
    format: str  # "HumanEval", "GSM8K", "MT-Bench", "JSON lines", "text" or "sample"
    prompts: tuple[str, ...]

    def first(self, count: int | None) -> PromptSet:
        """Return a set of at most `count` prompts; None: all."""
        return PromptSet(self.name, self.format, self.prompts[:count])

    @property
    def digest(self) -> str:
        """Hash of the prompts."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def find_prompts(name: str) -> PromptSet:
    """Return the prompts of `sample`, a file, a name of HUB_SETS or a dataset file `owner/name:path/to/file`."""
    if name == SAMPLE:
        return sample_prompts()
    path = Path(name).expanduser()
    if path.is_file():
        return _read(path, path.stem)
    repository, _, file = name.partition(":")
    if name.lower() in HUB_SETS:
        return _read(_from_hub(*HUB_SETS[name.lower()]), name.lower())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and file:
        return _read(_from_hub(repository, file), name)
    close = get_close_matches(name, [SAMPLE, *HUB_SETS], 1)
    hint = f"did you mean {close[0]}?" if close else f"check the path, or name one of {', '.join([SAMPLE, *HUB_SETS])}"
    raise UsageError(f"the prompt file {path} does not exist; {hint}")


def sample_prompts() -> PromptSet:
    """Return a few pieces of the sample text."""
    lines = sample_text().splitlines(keepends=True)
    starts = [number * len(lines) // _NUM_SAMPLES for number in range(_NUM_SAMPLES)]
    return PromptSet(SAMPLE, "sample", tuple("".join(lines[start : start + _SAMPLE_LINES]) for start in starts))


def parse_prompts(text: str, path: Path) -> PromptSet:
    """Parse JSON lines in any of the known formats, or the paragraphs of plain text."""
    if path.suffix in (".json", ".jsonl") or text.lstrip().startswith("{"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return _from_records(((_record(line, n, path), f"line {n} of {path}") for n, line in lines), path)
    parts = [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]
    return _require_prompts(PromptSet(path.stem, "text", tuple(parts)), path)


def _from_hub(repository: str, file: str) -> Path:
    from spmoe.models.hub import dataset_file  # slow: imports the hub client

    return dataset_file(repository, file)


def _read(path: Path, name: str) -> PromptSet:
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
        found = _from_records(((row, f"row {n} of {path}") for n, row in enumerate(rows, 1)), path)
    else:
        try:
            found = parse_prompts(path.read_text(encoding="utf-8-sig"), path)
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    return PromptSet(name, found.format, found.prompts)


def _from_records(records: Iterable[tuple[dict[str, Any], str]], path: Path) -> PromptSet:
    prompts, formats = [], set()
    for record, where in records:
        key, prompt = _find_prompt(record, where)
        known, second_key = _FORMATS[key]
        prompts.append(prompt)
        formats.add(known if second_key in record else "JSON lines")
    name = formats.pop() if len(formats) == 1 else "JSON lines"
    return _require_prompts(PromptSet(path.stem, name, tuple(prompts)), path)


def _require_prompts(found: PromptSet, path: Path) -> PromptSet:
    if not found.prompts:
        raise UsageError(f"{path} contains no prompt; write JSON lines or paragraphs of text")
    return found


def _record(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        record = decode_json(line)
    except ValueError as error:
        raise UsageError(f"line {number} of {path} is not JSON; write one object per line, or plain text") from error
    if not isinstance(record, dict):
        raise UsageError(f"line {number} of {path} is not a JSON object; write one per line, with a prompt")
    return record


def _find_prompt(record: dict[str, Any], where: str) -> tuple[str, str]:
    """Return the key of a record's prompt and the prompt, which for a conversation is its first turn."""
    for key in _FORMATS:
        value = record.get(key)
        if key == "turns":
            value = value[0] if isinstance(value, list) and value else None
        if not value:
            continue
        if isinstance(value, str):
            return key, value
        break
    raise UsageError(f"{where} has no text under prompt, question or turns; name it prompt")


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            f"{path.name} is a Parquet file, which pyarrow reads; run `pip install pyarrow`, or use JSON lines"
        ) from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise UsageError(f"{path} cannot be read as Parquet ({reason(error)}); check the file") from error
    return rows
