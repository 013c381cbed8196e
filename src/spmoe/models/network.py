"""A network: a transformers causal language model with its taps and KV states, as drafts and targets both are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmoe.models.anatomy import Anatomy, dissect
from spmoe.models.kv import KvState, can_rewind
from spmoe.models.taps import OnTap, Taps, Watch


class Network:
    """Runs tokens through a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.anatomy: Anatomy = dissect(model)
        self.can_rewind = can_rewind(model.config)
        text = model.config.get_text_config(decoder=True)
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.max_positions: int = text.max_position_embeddings
        self.depth_count = self.anatomy.depth_count
        self._taps = Taps(self.anatomy.norms)

    @property
    def has_taps(self) -> bool:
        """Whether every layer's residual stream can be seen."""
        return self._taps.complete

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay in memory; tied ones count once."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self.model.parameters()}
        return sum(storages.values())

    def new_kv(self, capacity: int) -> KvState:
        """Room for the attention state of one sequence."""
        return KvState(self.model.config, capacity)

    def forward(
        self, tokens: list[int], kv: KvState, keep: int, watch: Watch | None = None, on_tap: OnTap | None = None
    ) -> Tensor:
        """Append tokens to a sequence; logits of the last `keep` of them. Taps go to a watch or, raw, to `on_tap`."""
        # -> [keep, vocabulary]
        if watch is not None:
            on_tap = watch.tap(self.depth_count, lambda depths, slab: watch.tell(depths, slab, watch.ask(depths, slab)))
        ids = torch.tensor([tokens], device=self.model.device)
        with torch.inference_mode(), self._taps.listen(on_tap):
            output = self.model(input_ids=ids, past_key_values=kv.cache, use_cache=True, logits_to_keep=keep)
        kv.length += len(tokens)
        return output.logits[0]  # type: ignore[no-any-return]
