"""Conversations: turns, the part that fits in the context, and saved files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmoe.cli.conversation import Conversation, Message
from spmoe.errors import PromptError, UsageError


def count_tokens(messages: list[Message]) -> int:
    """Count three tokens for each message's template, and one for each character."""
    return sum(3 + len(message["content"]) for message in messages)


def talk(*texts: str, system: str | None = None) -> Conversation:
    """Return a conversation of messages and answers in turns."""
    conversation = Conversation(system)
    for number, text in enumerate(texts):
        (conversation.answer if number % 2 else conversation.ask)(text)
    return conversation


def contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_everything_is_read_while_there_is_room() -> None:
    conversation = talk("one", "two", "three", system="be brief")
    assert conversation.fit(count_tokens, limit=100, reserve=10) == 0
    assert contents(conversation.prompt) == ["be brief", "one", "two", "three"]
    assert [message["role"] for message in conversation.prompt] == ["system", "user", "assistant", "user"]


def test_oldest_turns_are_left_out_and_kept() -> None:
    conversation = talk("a" * 10, "b" * 10, "c" * 10, "d" * 10, "e" * 10, system="s")
    assert conversation.fit(count_tokens, limit=60, reserve=10) == 1  # 4 + 3 * 13 tokens are left
    assert contents(conversation.prompt) == ["s", "c" * 10, "d" * 10, "e" * 10]
    assert len(conversation.messages) == 5
    conversation.answer("f" * 10)
    conversation.ask("g")
    assert conversation.fit(count_tokens, limit=60, reserve=10) == 1  # one more
    assert contents(conversation.prompt) == ["s", "e" * 10, "f" * 10, "g"]


def test_newest_message_stays_and_takes_the_room_for_the_answer() -> None:
    conversation = talk("a", "b", "c" * 50)
    assert conversation.fit(count_tokens, limit=60, reserve=20) == 1
    assert contents(conversation.prompt) == ["c" * 50]


def test_message_longer_than_the_context() -> None:
    conversation = talk("a", "b")
    conversation.fit(count_tokens, limit=60, reserve=10)
    conversation.ask("c" * 57)
    with pytest.raises(PromptError, match="60 tokens but the context holds 60; shorten"):
        conversation.fit(count_tokens, limit=60, reserve=10)
    assert contents(conversation.messages) == ["a", "b", "c" * 57]
    assert conversation.omitted == 0


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=15),
    system=st.none() | st.text("s", max_size=9),
    limit=st.integers(4, 120),
    reserve=st.integers(0, 40),
)
def test_as_few_turns_as_possible_are_left_out(
    lengths: list[int], system: str | None, limit: int, reserve: int
) -> None:
    texts = [f"{number:x}" * length for number, length in enumerate(lengths)]
    conversation = talk(*texts, system=system)
    all_messages = list(conversation.messages)
    turns = (len(texts) + 1) // 2
    last = [*conversation.head, *all_messages[2 * (turns - 1) :]]
    if count_tokens(last) >= limit:
        with pytest.raises(PromptError):
            conversation.fit(count_tokens, limit, reserve)
        assert conversation.messages == all_messages
        return
    omitted = conversation.fit(count_tokens, limit, reserve)
    reserve = max(reserve, 1)  # an answer has at least one token
    assert conversation.prompt == [*conversation.head, *all_messages[2 * omitted :]]
    assert count_tokens(conversation.prompt) <= limit - reserve or omitted == turns - 1
    assert count_tokens(conversation.prompt) < limit
    if omitted:
        assert count_tokens([*conversation.head, *all_messages[2 * (omitted - 1) :]]) > limit - reserve
    assert conversation.messages == all_messages


def test_message_without_an_answer_is_replaced() -> None:
    conversation = talk("one", "two", "three")
    assert conversation.waiting
    conversation.ask("four")
    assert contents(conversation.messages) == ["one", "two", "four"]


def test_last_message_is_asked_again() -> None:
    conversation = talk("one", "two", "three", "four")
    conversation.ask_again()
    assert conversation.waiting
    assert contents(conversation.messages) == ["one", "two", "three"]
    conversation.ask_again()
    assert contents(conversation.messages) == ["one", "two", "three"]
    with pytest.raises(UsageError, match="no message"):
        Conversation().ask_again()
    started_by_the_model = Conversation(None, [{"role": "assistant", "content": "hello"}, *talk("one", "two").messages])
    started_by_the_model.ask_again()
    assert contents(started_by_the_model.messages) == ["hello", "one"]


def test_reset_keeps_the_system_message() -> None:
    conversation = talk("one", "two", system="be brief")
    conversation.reset()
    assert contents(conversation.prompt) == ["be brief"]
    conversation.set_system(None)
    assert conversation.prompt == []


def test_text_that_is_not_unicode_is_refused() -> None:
    conversation = talk("one", "two")
    for use in (conversation.ask, conversation.set_system):
        with pytest.raises(PromptError, match="not UTF-8"):
            use("caf\udce9")
    assert contents(conversation.prompt) == ["one", "two"]


# ---- files


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=5), system=st.booleans())
def test_saved_conversation_is_read_back(
    texts: list[str], system: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "conversation.json"
    conversation = talk(*texts, system="be brief" if system else None)
    conversation.save(path, "model")
    assert json.loads(path.read_text())["model"] == "model"
    loaded = Conversation.load(path)
    assert loaded.prompt == conversation.prompt
    assert loaded.head == conversation.head


def test_saved_file_has_the_turns_that_were_left_out(tmp_path: Path) -> None:
    conversation = talk("a" * 30, "b", "c" * 30)
    assert conversation.fit(count_tokens, limit=60, reserve=10) == 1
    conversation.save(tmp_path / "saved.json", "model")
    assert contents(json.loads((tmp_path / "saved.json").read_text())["messages"]) == ["a" * 30, "b", "c" * 30]


def test_list_of_messages_is_read(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "me"}]')
    assert Conversation.load(path).prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "not JSON"),
        ("{}", 'no list of "messages"'),
        ('{"messages": "hello"}', 'no list of "messages"'),
        ('["hello"]', "message 1 .* must have a role of system, user, assistant"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]', "message 2 .* user, assistant"),
        ('[{"role": "user", "content": ["a"]}]', "message 1 .* text as its content"),
        (r'[{"role": "user", "content": "\ud800"}]', "not text"),
        ('[{"role": "user"}]', "message 1 .* text as its content"),
    ],
)
def test_file_that_is_not_a_conversation(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        Conversation.load(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name, words in (("nowhere.json", "cannot read"), (".", "cannot read"), ("bytes.json", "not JSON")):
        with pytest.raises(UsageError, match=words):
            Conversation.load(tmp_path / name)
    with pytest.raises(UsageError, match="cannot write"):
        talk("one").save(tmp_path / "nowhere" / "file.json", "model")
