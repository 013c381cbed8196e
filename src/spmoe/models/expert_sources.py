"""Find the checkpoint's tensors that hold experts, and convert them by transformers' own rules."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

from spmoe.errors import CheckpointError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.tensors import natural

StoredExpert = tuple[str, int | None]  # a tensor of an expert, and the expert's index if the tensor holds all experts


class Source:
    """Tensors that one part of a fused parameter comes from: one per expert, or one that holds all experts."""

    def __init__(self, pattern: str | None, names: list[str], fused: bool) -> None:
        self.pattern = pattern  # of the conversion rule; None: stored as the module holds it
        self.names = names  # by expert, or only one
        self.fused = fused

    def place(self, expert: int) -> StoredExpert:
        """Return where an expert is stored."""
        return (self.names[0], expert) if self.fused else (self.names[expert], None)


class ExpertSources:
    """The sources of every parameter of a model's experts modules. Raises CheckpointError if one is incomplete."""

    def __init__(self, checkpoint: Checkpoint, model: Any, paths: list[str], names: list[str]) -> None:
        """Take the names of the checkpoint's tensors, as dense tensors are called."""
        self._checkpoint = checkpoint
        self._model = model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        merging = (rule for rule in self._converters if any(isinstance(op, MergeModulelist) for op in rule.operations))
        self._per_expert = {pattern for rule in merging for pattern in rule.source_patterns}  # one tensor per expert
        self.shapes: dict[str, tuple[int, ...]] = {  # of fused parameters, as modules hold them
            f"{path}.{name}": shape for path in paths for name, shape in model.get_submodule(path).spmoe_shapes.items()
        }
        known = dict.fromkeys([*model.state_dict(), *self.shapes], True)
        found: dict[str, dict[str | None, list[str]]] = {target: {} for target in self.shapes}
        for name in sorted(names, key=natural):
            target, pattern = rename_source_key(name, renamings, self._converters, model.base_model_prefix, known)
            if target in found:
                found[target].setdefault(pattern, []).append(name)
        self._sources = {target: self._in_order(target, sources) for target, sources in found.items()}

    def of(self, target: str) -> list[Source]:
        """Return the sources of a fused parameter in the order of its rule."""
        return self._sources[target]

    def matrices(self) -> set[str]:
        """Return the names of all tensors that hold experts' matrices."""
        targets = [target for target, shape in self.shapes.items() if len(shape) == 3]
        return {name for target in targets for source in self._sources[target] for name in source.names}

    def convert(self, target: str, tensors: dict[str | None, Tensor]) -> Tensor:
        """Apply the conversion rule of a parameter to one expert's tensors, by pattern; raise as the rule does."""
        # each tensor is that of one expert, or the slice [1, ...] of one that holds all experts -> [1, ...]
        if None in tensors:
            return tensors[None]
        converter = next(c for c in self._converters if set(tensors) <= set(c.source_patterns))
        found: Any = {pattern: [tensor] for pattern, tensor in tensors.items()}
        for operation in converter.operations:
            found = operation.convert(
                found,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        (fused,) = found.values()  # the rule sees one expert
        return fused  # type: ignore[no-any-return]

    def _check_numbers(self, target: str, pattern: str | None, names: list[str]) -> None:
        """Raise CheckpointError unless tensors of single experts are those of expert 0, 1, 2, ..."""
        if pattern is None or "*" not in pattern or len(names) == 1:
            return
        place = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
        numbers = [int(match[1]) for name in names if (match := place.search(name))]
        missing = sorted(set(range(len(names))) - set(numbers))
        if len(numbers) == len(names) and missing:
            raise CheckpointError(
                f"{self._checkpoint.name} lacks expert {missing[0]} of {target}, though it holds {names[-1]}; the "
                "checkpoint is incomplete: download it again"
            )

    def _in_order(self, target: str, found: dict[str | None, list[str]]) -> list[Source]:
        count = self.shapes[target][0]
        if not found:
            raise CheckpointError(
                f"{self._checkpoint.name} lacks {target}; the checkpoint is incomplete or config.json does not belong "
                "to it: download it again"
            )
        for pattern, names in found.items():
            if len(names) != count and (len(names) > 1 or pattern in self._per_expert):
                experts = f"{len(names)} expert{'s' * (len(names) > 1)}"
                raise CheckpointError(
                    f"{self._checkpoint.name} has {experts} for {target} but config.json says {count}; the "
                    "checkpoint is incomplete or config.json does not belong to it: download it again"
                )
            self._check_numbers(target, pattern, names)
        if None in found and len(found) > 1:
            other = next(names[0] for pattern, names in found.items() if pattern is not None)
            raise CheckpointError(
                f"{self._checkpoint.name} holds {target} twice, as {found[None][0]} and as {other}, so it is unclear "
                "which is the weight; use another upload"
            )
        rule = next((c for c in self._converters if set(found) <= set(c.source_patterns)), None)
        patterns = list(found) if rule is None else [pattern for pattern in rule.source_patterns if pattern in found]
        return [Source(p, found[p], len(found[p]) == 1 and p not in self._per_expert) for p in patterns]
