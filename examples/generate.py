"""Complete several prompts and print how they ended: python examples/generate.py [MODEL]."""

import sys

from spmoe import LLM, SamplingParams

PROMPTS = ["def fibonacci(n):", "class Stack:\n", "import os\n"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the small pair that comes with spmoe
    with LLM(model, expert_memory="25%") as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=32)), strict=True):
            print(f"--- {prompt.strip()} ({result.outputs[0].finish_reason})")
            print(prompt + result.outputs[0].text)


if __name__ == "__main__":
    main()
