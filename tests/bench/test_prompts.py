"""Prompt sets: formats, sources and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmoe.bench import prompts
from spmoe.bench.prompts import HUB_SETS, PromptSet, find_prompts, parse_prompts, sample_prompts
from spmoe.errors import UsageError


@pytest.mark.parametrize(
    ("name", "text", "prompt_format", "expected"),
    [
        (
            "own.jsonl",
            '{"prompt": "one\\nline"}\n\n{"prompt": "two", "question": "x"}',
            "JSON lines",
            ["one\nline", "two"],
        ),
        ("he.jsonl", '{"task_id": "HumanEval/0", "prompt": "def f():\\n", "test": ""}', "HumanEval", ["def f():\n"]),
        ("gsm8k.jsonl", '{"question": "How many?", "answer": "3"}', "GSM8K", ["How many?"]),
        ("mt.jsonl", '{"question_id": 81, "turns": ["first", "second"]}', "MT-Bench", ["first"]),
        ("mixed.jsonl", '{"question": "q", "answer": "3"}\n{"prompt": "p"}', "JSON lines", ["q", "p"]),
        ("no-suffix", '  {"prompt": "a\u2028b"}', "JSON lines", ["a\u2028b"]),
        ("text.txt", "\n\none\n  two\n \n\nthree\n", "text", ["one\n  two", "three"]),
    ],
)
def test_parse_prompts_in_every_format(name: str, text: str, prompt_format: str, expected: list[str]) -> None:
    found = parse_prompts(text, Path(name))
    assert (found.format, list(found.prompts)) == (prompt_format, expected)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.txt", " \n\n", "no prompt"),
        ("empty.jsonl", "\n", "no prompt"),
        ("bad.jsonl", '{"prompt": "x"}\n{"prompt"', "line 2 of bad.jsonl is not JSON"),
        ("list.json", '["x"]', "line 1 of list.json is not a JSON object"),
        ("none.jsonl", '{"prompt": "x"}\n\n{"text": "x"}', "line 3 of none.jsonl has no text under prompt"),
        ("number.jsonl", '{"prompt": 3}', "has no text"),
        ("blank.jsonl", '{"prompt": ""}', "has no text"),
        ("turns.jsonl", '{"turns": [[]]}', "has no text"),
    ],
)
def test_file_without_prompts_is_rejected(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_prompts(text, Path(name))


def test_sample_has_four_prompts() -> None:
    found = sample_prompts()
    assert len(set(found.prompts)) == 4
    assert all(200 < len(prompt) < 2000 for prompt in found.prompts)
    assert find_prompts("sample") == found


def test_digest_depends_on_prompts_only() -> None:
    one, other = PromptSet("x", "text", ("a", "b")), PromptSet("x", "text", ("a", "c"))
    assert one.digest != other.digest
    assert one.digest == PromptSet("y", "sample", ("a", "b")).digest
    assert one.first(1).prompts == ("a",)
    assert one.first(None) == one


def test_find_prompts_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "x"}')
    assert find_prompts(str(tmp_path / "mine.jsonl")) == PromptSet("mine", "JSON lines", ("x",))
    with pytest.raises(UsageError, match=r"file .*other.jsonl does not exist.*check the path.*humaneval"):
        find_prompts(str(tmp_path / "other.jsonl"))
    with pytest.raises(UsageError, match="did you mean humaneval"):
        find_prompts("human-eval")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        find_prompts(str(tmp_path / "bytes"))


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert find_prompts(str(file)).prompts == ("one", "two")


def test_deeply_nested_line_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text('{"prompt": ' + "[" * 200_000)
    with pytest.raises(UsageError, match=r"line 1 of .* is not JSON"):
        find_prompts(str(file))


def test_find_prompts_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[str, str]] = []
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps({"question_id": 1, "turns": ["hello"]}))

    def download(repository: str, name: str) -> Path:
        requested.append((repository, name))
        return file

    monkeypatch.setattr(prompts, "_from_hub", download)
    assert find_prompts("MT-Bench") == PromptSet("mt-bench", "MT-Bench", ("hello",))
    assert find_prompts("somebody/else:data/test.jsonl").prompts == ("hello",)
    assert requested == [HUB_SETS["mt-bench"], ("somebody/else", "data/test.jsonl")]


@pytest.mark.parametrize("name", HUB_SETS)
def test_hub_prompts_need_a_connection(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be had from the hub.*go online"):
        find_prompts(name)


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1")

    def without(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(prompts, "import_module", without)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        find_prompts(str(tmp_path / "test.parquet"))

    class Table:
        def to_pylist(self) -> list[dict[str, str]]:
            return [{"task_id": "HumanEval/0", "prompt": "def f():"}]

    class Reader:
        @staticmethod
        def read_table(path: Path) -> Table:
            assert path.name == "test.parquet"
            return Table()

    monkeypatch.setattr(prompts, "import_module", lambda name: Reader)
    assert find_prompts(str(tmp_path / "test.parquet")) == PromptSet("test", "HumanEval", ("def f():",))
