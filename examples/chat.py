"""Hold a conversation; an empty line or Ctrl-D ends it: python examples/chat.py [MODEL].

The small pair that comes with spmoe only continues Python source; give a chat model for real answers. `spmoe chat` has
more: line editing, commands, saved conversations.
"""

import sys
from contextlib import suppress

from spmoe import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    with LLM(model) as llm, suppress(EOFError):
        while text := input("> "):
            messages.append({"role": "user", "content": text})
            pieces = []
            for piece in llm.stream_chat(messages, SamplingParams(max_tokens=48)):
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": "".join(pieces)})


if __name__ == "__main__":
    main()
