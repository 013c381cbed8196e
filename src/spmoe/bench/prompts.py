"""Prompt sets: from files of well-known forms, from the hub, or cut from the sample text."""

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
from spmoe.models.shipped import sample_text

SAMPLE = "sample"
HUB_SETS = {  # datasets of the hub, and the file of each that holds its prompts
    "humaneval": ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
    "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
}
_FORMS = {"prompt": "HumanEval", "question": "GSM8K", "turns": "MT-Bench"}  # what a key of a record is the sign of
_MARKS = {"HumanEval": "task_id", "GSM8K": "answer", "MT-Bench": "question_id"}  # and what such a record has besides
_SAMPLES, _SAMPLE_LINES = 4, 20  # prompts cut from the sample text


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts, and where they are from."""

    name: str
    form: str  # "HumanEval", "GSM8K", "MT-Bench", "JSON lines", "text" or "sample"
    prompts: tuple[str, ...]

    def first(self, count: int | None) -> PromptSet:
        """No more than so many of them."""
        return PromptSet(self.name, self.form, self.prompts[:count])

    @property
    def digest(self) -> str:
        """What tells one set from another."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def find_prompts(name: str) -> PromptSet:
    """The set of this name: `sample`, a file, or one of the hub's.

    Of the hub there are those of `HUB_SETS` and, written as owner/name:path/to/file, any file of any dataset.
    """
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
    near = get_close_matches(name, [SAMPLE, *HUB_SETS], 1)
    hint = f"did you mean {near[0]}?" if near else f"check the path, or name one of {', '.join([SAMPLE, *HUB_SETS])}"
    raise UsageError(f"there is no file {path} to read prompts from; {hint}")


def sample_prompts() -> PromptSet:
    """A few pieces of the sample text."""
    lines = sample_text().splitlines(keepends=True)
    starts = [number * len(lines) // _SAMPLES for number in range(_SAMPLES)]
    return PromptSet(SAMPLE, "sample", tuple("".join(lines[start : start + _SAMPLE_LINES]) for start in starts))


def parse_prompts(text: str, path: Path) -> PromptSet:
    """Prompts from JSON lines, of any of the forms that well-known sets have, or from the paragraphs of plain text."""
    if path.suffix in (".json", ".jsonl") or text.lstrip().startswith("{"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return _from_records(((_record(line, n, path), f"line {n} of {path}") for n, line in lines), path)
    parts = [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]
    return _some(PromptSet(path.stem, "text", tuple(parts)), path)


def _from_hub(repository: str, file: str) -> Path:
    from spmoe.models.checkpoint import dataset_file  # imports the hub's client

    return dataset_file(repository, file)


def _read(path: Path, name: str) -> PromptSet:
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
        found = _from_records(((row, f"row {n} of {path}") for n, row in enumerate(rows, 1)), path)
    else:
        try:
            found = parse_prompts(path.read_text(encoding="utf-8"), path)
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    return PromptSet(name, found.form, found.prompts)


def _from_records(records: Iterable[tuple[dict[str, Any], str]], path: Path) -> PromptSet:
    prompts, forms = [], set()
    for record, where in records:
        key, prompt = _prompt_of(record, where)
        form = _FORMS[key]
        prompts.append(prompt)
        forms.add(form if _MARKS[form] in record else "JSON lines")
    return _some(PromptSet(path.stem, forms.pop() if len(forms) == 1 else "JSON lines", tuple(prompts)), path)


def _some(found: PromptSet, path: Path) -> PromptSet:
    if not found.prompts:
        raise UsageError(f"{path} holds no prompt; write JSON lines or paragraphs of text")
    return found


def _record(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"line {number} of {path} is not JSON; write one object per line, or plain text"
        ) from error  # fmt: skip
    if not isinstance(record, dict):
        raise UsageError(f"line {number} of {path} is not a JSON object; write one per line, with a prompt")
    return record


def _prompt_of(record: dict[str, Any], where: str) -> tuple[str, str]:
    """The key that a record's prompt is under, and the prompt; of a conversation, its first turn."""
    for key in _FORMS:
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
            f"{path.name} is a Parquet file, which takes pyarrow to read; pip install pyarrow, or name a file of JSON "
            "lines"
        ) from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise UsageError(f"{path} is not a Parquet file that can be read ({reason(error)})") from error
    return rows
