"""Greedy verification: the longest prefix of the draft that the target would have chosen itself."""

from __future__ import annotations

import torch
from torch import Tensor

from spmoe.types import Draft, Sequence, Verdict
from spmoe.verify.filters import require_numbers


class GreedyVerifier:
    """Keeps draft tokens as long as each is the target's most likely one."""

    def judge(self, sequence: Sequence, draft: Draft, logits: Tensor) -> Verdict:
        best = logits.max(dim=-1)
        # in one transfer from whatever device; a double holds every token id
        largest, choices = torch.stack((best.values.double(), best.indices.double())).tolist()  # 2 x [K + 1]
        require_numbers(largest)
        accepted = 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
            accepted += 1
        return Verdict(accepted, int(choices[accepted]))
