"""`spmoe chat`: hold a conversation."""

from __future__ import annotations

import json
import sys
from typing import Any

from spmoe.cli.options import (
    Json,
    ctrl_c_stops,
    load,
    readable_stdin,
    sampling_params,
    stderr,
    stream_text,
    takes_shared_options,
)
from spmoe.errors import PromptError


@takes_shared_options
def chat(engine: dict[str, Any], params: dict[str, Any], as_json: Json = False) -> None:
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D or an empty line ends the conversation.

    With --json, print one object per answer.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed, but chat reads messages from it; open it")
    messages: list[dict[str, str]] = []
    with load(engine, progress=not as_json) as llm:
        sampling = sampling_params(llm, params)
        while message := _read_line():
            messages.append({"role": "user", "content": message})
            generation = llm.stream_chat(messages, sampling)
            with ctrl_c_stops(generation):
                stream_text(generation, quiet=as_json)
            completion = generation.completion
            if completion.finish_reason == "interrupted":
                stderr().print("(stopped)")
            messages.append({"role": "assistant", "content": completion.text})
            if as_json:
                print(json.dumps(completion.to_dict()), flush=True)


def _read_line() -> str:
    try:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        with readable_stdin():
            return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""
