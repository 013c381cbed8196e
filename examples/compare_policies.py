"""Compare prefetch policies on one prompt: python examples/compare_policies.py.

An emulated link of 0.2 GB/s stands for a GPU whose experts do not fit. The text is the same under every policy; the
time that the model waits for experts (stall) is not. `spmoe bench` compares with repeats, spread and ceilings.
"""

from spmoe import LLM, SamplingParams

PROMPT = "def fibonacci(n):"
POLICIES = ["on-demand", "next-gate", "draft-gate"]


def main() -> None:
    texts = set()
    print(f"{'prefetch':12}{'hit rate':>10}{'stall ms':>10}{'ms/token':>10}")
    for policy in POLICIES:
        with LLM(prefetch=policy, expert_memory="25%", num_speculative_tokens=4, link_gbps=0.2) as llm:
            llm.generate(PROMPT, SamplingParams(max_tokens=8))  # warm-up: fills the slots, measures the cutoff
            generation = llm.stream(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))
            texts.add("".join(generation))
            stats = generation.completion.stats
        counters, tpot = stats.counters, stats.tpot_seconds or 0.0
        print(f"{policy:12}{counters.hit_rate:10.1%}{1e3 * counters.stall_seconds:10.1f}{1e3 * tpot:10.1f}")
    assert len(texts) == 1, "policies never change the text"


if __name__ == "__main__":
    main()
