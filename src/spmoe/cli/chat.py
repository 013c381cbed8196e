"""`spmoe chat`: keep a conversation."""

from __future__ import annotations

import json
import sys
from typing import Any

from spmoe.cli.options import Json, load, stderr, takes_shared_options
from spmoe.config import SamplingParams
from spmoe.errors import PromptError


@takes_shared_options
def chat(engine: dict[str, Any], params: SamplingParams, as_json: Json = False) -> None:
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D or an empty line ends the conversation.

    With --json, one object per answer.
    """
    messages: list[dict[str, str]] = []
    with load(engine, progress=not as_json) as llm:
        while said := _read_line():
            messages.append({"role": "user", "content": said})
            generation = llm.stream_chat(messages, params)
            try:
                for piece in generation:
                    if not as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
            except KeyboardInterrupt:
                stderr().print("\n(stopped)")
            completion = generation.completion
            messages.append({"role": "assistant", "content": completion.text})
            print(json.dumps(completion.to_dict()) if as_json else "", flush=True)


def _read_line() -> str:
    try:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""
    except UnicodeDecodeError as error:
        raise PromptError("standard input is not UTF-8 text") from error
