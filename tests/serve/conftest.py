"""Fixtures: one engine of the shipped pair, a server for it, and a tiny engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from serving import RunningServer, running

from spmoe import LLM, AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    """The shipped pair, in float32: text does not depend on the number of draft tokens."""
    with AsyncLLM(dtype="float32", expert_memory="60%", num_speculative_tokens=2, progress=False) as made:
        yield made


@pytest.fixture(scope="session")
def server(llm: AsyncLLM) -> Iterator[RunningServer]:
    """A server with default options."""
    with running(llm) as made:
        yield made


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    """A client of that server."""
    return server.client()


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """A random Mixtral whose tokens are bytes; its chat template takes tools. Fast."""
    from checkpoints import byte_tokenizer, mixtral, save, seeded

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}{% for message in messages %}"
        "{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ style or '' }}assistant: {% endif %}"
    )
    path = save(seeded(mixtral, 12, max_position_embeddings=1024), tmp_path_factory.mktemp("tiny"), tokenizer)
    with AsyncLLM(llm=LLM(path, draft="none", progress=False)) as made:
        yield made
