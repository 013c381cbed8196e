"""From the matrices of a scenario to jobs; everything that can be checked without loading weights is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from spmoe.backends.devices import choose_device
from spmoe.bench.configs import BenchConfig, make_configs
from spmoe.bench.prompts import PromptSet, find_prompts
from spmoe.bench.runs import BenchJob, require_context
from spmoe.bench.scenario import EVERY, SHIPPED, Matrix
from spmoe.config import AUTO_DRAFT, CpuThreads, Cutoff, CutoffMode, DraftTokens, EngineConfig, Size
from spmoe.engine.llm import with_default_pair
from spmoe.engine.plan import Plan, make_plan
from spmoe.errors import UsageError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.loaded import wide_shape
from spmoe.models.shipped import shipped_pair
from spmoe.models.tokenizer import tokenizer_of


@dataclass(frozen=True)
class Workload:
    """One model, draft, shape, link, prompt set, expert format, CPU path and residency check of a matrix."""

    matrix: Matrix
    model: str | None
    draft: str | None
    shape: str | None
    link: float | None  # GB/s to emulate
    prompts: str
    expert_format: str = "auto"
    cpu_experts: CpuThreads = "off"
    residency_check: str = "auto"

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of the engine that all configurations share."""
        target, draft = shipped_pair()
        return with_default_pair(
            {
                "model": target if self.model == SHIPPED else self.model,
                "draft": draft if self.draft == SHIPPED else self.draft,
                "shape": self.shape,
                "expert_format": self.expert_format,
                "cpu_experts": self.cpu_experts,
                "residency_check": self.residency_check,
                "link_gbps": self.link,
                "dtype": self.matrix.dtype,
                "device": self.matrix.device,
                "projection": self.matrix.projection,
                "enforce_eager": self.matrix.enforce_eager,
                "load_format": self.matrix.load_format,
            }
        )


def make_workloads(matrix: Matrix) -> list[Workload]:
    """Return every workload of a matrix, in the order given."""
    models, drafts = matrix.models or (None,), matrix.drafts or (AUTO_DRAFT,)
    paths = matrix.expert_formats, matrix.cpu_experts, matrix.residency_checks
    combinations = product(models, drafts, matrix.shapes, matrix.links, matrix.prompts, *paths)
    return [Workload(matrix, *values) for values in combinations]


def make_job(
    workload: Workload, progress: bool, resident: Mapping[DraftTokens, float], labels: Mapping[str, Any]
) -> BenchJob:
    """Read model configs, tokenizer and prompts, and check that every configuration can run.

    `resident` gives seconds of a step with all experts in slots by K, if known; `labels` go into the results.
    """
    matrix, options = workload.matrix, {**workload.engine_options, "progress": progress}
    config = EngineConfig.make(**options, num_speculative_tokens=0)
    wide_shape(config, choose_device(config.device))
    configs = _make_configs(matrix, options)
    prompt_set = find_prompts(workload.prompts).first(matrix.max_prompts)
    prompts = _encode(config, prompt_set)
    for memory in matrix.budgets:
        if config.shape is None or memory.share is not None:  # a share is the same number of widened experts
            plan = _plan(options, memory)
            if config.shape is None:
                require_context(prompts, matrix.output_len, plan.target.max_length)
    labels = {
        "matrix": matrix.name,
        "prompt_set": prompt_set.name,
        "prompt_format": prompt_set.format,
        "prompt_digest": prompt_set.digest,
        **labels,
    }
    return BenchJob(options, configs, prompts, matrix.output_len, matrix.repeat, matrix.warmup, dict(resident), labels)


def _make_configs(matrix: Matrix, options: dict[str, Any]) -> list[BenchConfig]:
    config = EngineConfig.make(**options)
    draft_tokens = matrix.draft_tokens
    if config.resolved_draft is None and "draft_tokens" not in matrix.model_fields_set:
        draft_tokens = (0,)
    drafts = any(k for pair in matrix.policy_pairs for k in pair.draft_tokens or draft_tokens)
    if drafts and config.resolved_draft is None:
        raise UsageError("speculation needs a draft; give one with --draft, or use --num-speculative-tokens 0")
    cutoffs: list[Cutoff] = []
    for cutoff in matrix.cutoffs:
        if isinstance(cutoff, Cutoff):
            cutoffs.append(cutoff)
        elif cutoff == EVERY:
            plan = _plan(options, matrix.budgets[0])
            cutoffs += [Cutoff(CutoffMode.FIXED, layers) for layers in range(plan.target.moe_layers + 1)]
    configs = make_configs(matrix.budgets, matrix.policy_pairs, draft_tokens, cutoffs, matrix.ablation)
    for one in configs:
        EngineConfig.make(**options, **one.engine_options)
    return configs


def _encode(config: EngineConfig, prompt_set: PromptSet) -> list[list[int]]:
    tokenizer = tokenizer_of(Checkpoint.find(config.model, load_format=config.load_format))
    if tokenizer is None:
        raise UsageError(f"{config.model} has no tokenizer, which prompts need; add its tokenizer.json")
    return [tokenizer(prompt)["input_ids"] for prompt in prompt_set.prompts]


def _plan(options: dict[str, Any], memory: Size) -> Plan:
    return make_plan(EngineConfig.make(**{**options, "expert_memory": memory, "num_speculative_tokens": 0}))
