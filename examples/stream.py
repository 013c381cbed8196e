"""Print sampled text as it is generated; Ctrl-C stops it: python examples/stream.py [PROMPT]."""

import signal
import sys

from spmoe import LLM, SamplingParams


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_lines(path):\n"
    params = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=1)
    with LLM(num_speculative_tokens=4) as llm:
        generation = llm.stream(prompt, params)
        before = signal.signal(signal.SIGINT, lambda *_: generation.stop())  # after the current step
        print(prompt, end="")
        for piece in generation:
            print(piece, end="", flush=True)
        signal.signal(signal.SIGINT, before)
        print("\n--- stopped" if generation.stopped else "\n--- finished")


if __name__ == "__main__":
    main()
