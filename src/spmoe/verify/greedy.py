"""Greedy verification: the longest prefix of the draft that the target would have chosen itself."""

from __future__ import annotations

from torch import Tensor

from spmoe.types import Draft, Sequence, Verdict


class GreedyVerifier:
    """Keeps draft tokens as long as each is the target's most likely one."""

    def judge(self, sequence: Sequence, draft: Draft, logits: Tensor) -> Verdict:
        choices: list[int] = logits.argmax(dim=-1).tolist()  # [K + 1]
        accepted = 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
            accepted += 1
        return Verdict(accepted, choices[accepted])
