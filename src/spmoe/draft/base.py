"""The contract of a drafter: propose tokens, and show its model's hidden states on the way.

A drafter is one module of this package that registers one class: `ngram.py` registers `ngram`. `--draft NAME:ARGUMENT`
selects it; any other text is a checkpoint and selects `model`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from spmoe import types
from spmoe.errors import DraftError
from spmoe.experts.run_ahead import RunAhead
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.kv import KvState
from spmoe.models.loaded import LoadedModels
from spmoe.models.runner import ModelRunner


class Observers(Protocol):
    """Makes observers that show a forward's hidden states to the prefetch policy."""

    def observer(self, stage: types.Stage, chunks: int, *, immediate: bool = False) -> LayerObserver | None:
        """Return an observer of a forward of this stage; None if the policy does not look at it."""
        ...


@dataclass(frozen=True)
class DraftSources:
    """Everything that a drafter's model is loaded from."""

    argument: str  # of `--draft NAME:ARGUMENT`
    checkpoint: Checkpoint | None  # of a draft that is another checkpoint
    models: LoadedModels
    progress: bool


@dataclass(frozen=True)
class DraftContext:
    """Everything a drafter is built from."""

    runner: ModelRunner | None  # the model that `load_runner` returned
    vocab_size: int  # of the target
    device: torch.device
    prefill_chunk: int
    run_ahead: RunAhead
    target_kv: MutableMapping[int, KvState]  # the target's KV caches by sequence id


class Drafter:
    """Proposes up to K tokens per sequence. It keeps the state of every sequence until `release`."""

    runner: ModelRunner | None = None  # the model that drafts, if there is one
    routes_experts = False  # whether its own routers predict the target's experts
    proposes = True  # whether it ever proposes a token

    @classmethod
    def load_runner(cls, sources: DraftSources) -> ModelRunner | None:
        """Load the drafter's model, if it has one. Called before memory is divided."""
        return None

    @classmethod
    def notice(cls, sources: DraftSources, runner: ModelRunner | None) -> str | None:
        """Return a notice for the user about the loaded model, if there is one."""
        return None

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        """Make the drafter."""
        raise NotImplementedError

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        """Read the sequences' new tokens and propose up to K more for each; with K = 0 only read a new prompt."""
        raise NotImplementedError

    def read_prompt(self, sequence: types.Sequence) -> bool:
        """Read a chunk of a new prompt if more than one is left, ahead of `propose`; return whether there was one."""
        return False

    def num_comparable(self, sequence: types.Sequence) -> int:
        """Return the number of tokens, decoded without a draft since the last one, that `compare` can judge."""
        return 0

    def compare(self, sequence: types.Sequence) -> list[bool | None]:
        """Return whether it would have proposed each of these tokens; None: it would have proposed nothing.

        The tokens are then read, as by `propose`.
        """
        return []

    def launch(self, sequence: types.Sequence, k: int, observers: Observers) -> None:
        """Launch the next draft on the device, if it can run there without the host."""

    def prepare(self, k: int, max_num_seqs: int, observers: Observers) -> None:
        """Capture the forwards of greedy drafts of up to K tokens, for one and for several sequences."""

    def kv_cache(self, sequence_id: int) -> KvState | None:
        """Return its own KV cache of a sequence, if it has one."""
        return None

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Forget, per sequence id, every position from the given length on."""

    def release(self, sequence_id: int) -> None:
        """Drop the state of a finished sequence."""


def check_draft(draft: types.Draft, k: int, vocab_size: int) -> None:
    """Raise DraftError unless this is a draft of at most K tokens of the target's vocabulary."""
    if not isinstance(draft, types.Draft):
        raise DraftError(f"it is a {type(draft).__name__}, not a Draft")
    if len(draft.tokens) > k:
        raise DraftError(f"it has {len(draft.tokens)} tokens, where at most {k} were asked for")
    for token in draft.tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DraftError(f"{token!r} is not a token of the target's vocabulary of {vocab_size}")
