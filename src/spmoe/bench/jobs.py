"""From a matrix to jobs: whatever can be refused without loading a weight is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from spmoe.backends.devices import choose_device
from spmoe.bench.prompts import PromptSet, find_prompts
from spmoe.bench.runs import Job, require_room
from spmoe.bench.scenario import EVERY, SHIPPED, Matrix
from spmoe.bench.settings import Setting, settings_of
from spmoe.config import Cutoff, CutoffMode, DraftTokens, EngineConfig, Size
from spmoe.engine.llm import with_default_pair
from spmoe.engine.loading import wide_shape
from spmoe.engine.plan import Plan, make_plan
from spmoe.errors import UsageError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.shipped import shipped_pair
from spmoe.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Case:
    """One combination of what an engine is built from, and the prompts for it."""

    matrix: Matrix
    model: str | None
    draft: str | None
    shape: str | None
    link: float | None
    prompts: str

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the engine, all configurations alike."""
        target, draft = shipped_pair()
        return with_default_pair(
            {
                "model": target if self.model == SHIPPED else self.model,
                "draft": draft if self.draft == SHIPPED else self.draft,
                "shape": self.shape,
                "link_gbps": self.link,
                "dtype": self.matrix.dtype,
                "device": self.matrix.device,
                "projection": self.matrix.projection,
                "enforce_eager": self.matrix.enforce_eager,
            }
        )


def cases_of(matrix: Matrix) -> list[Case]:
    """Every case of a matrix, in the order given."""
    every = product(matrix.models, matrix.drafts, matrix.shapes, matrix.links, matrix.prompts)
    return [Case(matrix, *one) for one in every]


def make_job(case: Case, progress: bool, resident: Mapping[DraftTokens, float], labels: Mapping[str, Any]) -> Job:
    """Read configs, tokenizer and prompts, and refuse what cannot be run."""
    matrix, options = case.matrix, {**case.engine, "progress": progress}
    config = EngineConfig.make(**options, num_speculative_tokens=0)
    wide_shape(config, choose_device(config.device))
    settings = _settings(matrix, options)
    found = find_prompts(case.prompts).first(matrix.max_prompts)
    prompts = _encode(config, found)
    for memory in matrix.budgets:
        if config.shape is None or memory.share is not None:  # a share is the same number of wide experts
            plan = _plan(options, memory)
            if config.shape is None:
                require_room(prompts, matrix.output_len, plan.target.max_length)
    labels = {
        "matrix": matrix.name,
        "prompt_set": found.name,
        "prompt_form": found.form,
        "prompt_digest": found.digest,
        **labels,
    }
    return Job(options, settings, prompts, matrix.output_len, matrix.repeat, matrix.warmup, dict(resident), labels)


def _settings(matrix: Matrix, options: dict[str, Any]) -> list[Setting]:
    """The configurations of a case; all values have been seen to be of those there are."""
    config = EngineConfig.make(**options)
    drafted = any(k for system in matrix.systems for k in system.draft_tokens or matrix.draft_tokens)
    if drafted and config.draft is None:
        raise UsageError("drafting tokens takes a draft; give one with --draft, or --num-speculative-tokens 0")
    cutoffs: list[Cutoff] = []
    for cutoff in matrix.cutoffs:
        if isinstance(cutoff, Cutoff):
            cutoffs.append(cutoff)
        elif cutoff == EVERY:
            plan = _plan(options, matrix.budgets[0])
            cutoffs += [Cutoff(CutoffMode.FIXED, layers) for layers in range(plan.target.moe_layers + 1)]
    settings = settings_of(matrix.budgets, matrix.systems, matrix.draft_tokens, cutoffs, matrix.ablation)
    for setting in settings:
        EngineConfig.make(**options, **setting.changes)
    return settings


def _encode(config: EngineConfig, found: PromptSet) -> list[list[int]]:
    tokenizer = load_tokenizer(Checkpoint.find(config.model).directory)
    if tokenizer is None:
        raise UsageError(f"{config.model} ships no tokenizer, so it cannot read prompts; add its tokenizer.json")
    return [tokenizer(one)["input_ids"] for one in found.prompts]


def _plan(options: dict[str, Any], memory: Size) -> Plan:
    return make_plan(EngineConfig.make(**{**options, "expert_memory": memory, "num_speculative_tokens": 0}))
