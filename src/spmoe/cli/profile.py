"""`spmoe profile`: what the parts of a step take on this machine, and how well that predicts whole steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe.cli.listed import parse_list, parse_whole
from spmoe.cli.options import Json, ctrl_c_stops, load, stderr, takes_shared_options_but
from spmoe.cli.output import require_writable
from spmoe.config import Cutoff, CutoffMode, EngineConfig, Size
from spmoe.errors import UsageError
from spmoe.files import write_text

if TYPE_CHECKING:
    from spmoe.bench.profile import EngineProfile
    from spmoe.bench.profile_check import Check
    from spmoe.bench.profile_predict import Predictor
    from spmoe.engine.llm import LLM

_LEAST_DRAFT = 8  # K that the engine is built for: what it may record covers the rows that are timed
_APART = 128  # tokens from the beginning of one prompt to that of the next


@takes_shared_options_but("prefetch")  # all of them are looked at
def profile(
    engine: dict[str, Any],
    num_speculative_tokens: Annotated[
        str,
        typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted per step; the check takes several: 1,2,4."),
    ] = "4",
    expert_memory: Annotated[
        str, typer.Option(help="Memory for experts: a size or a share; the check takes several: 25%,50%.")
    ] = "25%",
    cutoff: Annotated[
        str | None, typer.Option(help="Depths that the check sweeps: 0,4,8,16 or every; default: some.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="CUDA: widen the pair to the sizes of this architecture, as mixtral-8x7b.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run short generations over a sweep, and compare with what is predicted.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Predict what is missing from this trace (`spmoe trace record`).")
    ] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Take this profile instead of measuring one.")
    ] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts that generations are made from.")] = 2,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each generation.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Times that the check runs each prompt.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile as JSON to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write plots as SVG to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what drafting, verifying and loading take, alone and at once, and what generations need of them.

    With --check, predict steps from that over K, cutoffs and budgets, run them, and say how far off it was.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(f"the plot is written as SVG; name the file {plot.with_suffix('.svg')}")
    memories = parse_list("--expert-memory", expert_memory, Size.parse)
    lengths = parse_list("--num-speculative-tokens", num_speculative_tokens, parse_whole)
    depths = _depths(cutoff)
    if stored is not None and output is not None:
        raise UsageError(
            "--from takes a profile that was measured before, so that there is none to write; leave out one"
        )
    if not check and (len(memories) > 1 or len(lengths) > 1 or cutoff is not None or trace is not None):
        raise UsageError("several values, --cutoff and --trace are for the check of predictions; add --check")
    for file in (output, plot):
        require_writable(file)
    engine = {**engine, "shape": shape, "prefetch": "on-demand"}
    EngineConfig.make(**{**engine, "model": engine["model"] or "", "num_speculative_tokens": max(lengths)})

    from spmoe.bench.profile import read_engine_profile
    from spmoe.replay.trace import Trace

    known = read_engine_profile(stored) if stored is not None else None
    recorded = Trace.load(trace) if trace is not None else None
    work = _Work(engine, memories, lengths, max_prompts, output_len, known, output)
    found = work.measure_only() if not check else None
    compared: Check | None = None
    if check:
        found, compared = work.check(recorded, depths, repeat)
    assert found is not None
    from spmoe.cli import profile_tables

    if plot is not None:
        write_text(plot, profile_tables.plots(found, compared))
    if as_json:
        print(json.dumps({**found.to_dict(), **({"check": compared.to_dict()} if compared is not None else {})}))
    else:
        profile_tables.show(found, compared)


class _Work:
    """What is measured on which engine."""

    def __init__(
        self,
        engine: dict[str, Any],
        memories: list[Size],
        lengths: list[int],
        num_prompts: int,
        output_len: int,
        known: EngineProfile | None,
        output: Path | None,
    ) -> None:
        self._engine, self._memories, self._lengths = engine, memories, lengths
        self._num_prompts, self._output_len = num_prompts, output_len
        self._known, self._output = known, output
        self._err = stderr()

    def measure_only(self) -> EngineProfile:
        """A profile, at the first budget and K."""
        if self._known is not None:
            return self._known
        with self._load(self._memories[0]) as llm:
            return self._measure(llm)

    def check(self, recorded: Any, depths: list[int] | None, repeat: int) -> tuple[EngineProfile, Check]:
        """A profile, and what comes of it on every budget."""
        from spmoe.bench.profile_check import Check, check_engine
        from spmoe.bench.profile_predict import Predictor
        from spmoe.bench.profile_trace import TraceNeeds

        predictor: Predictor | None = None
        found = Check([], [])
        for memory in self._memories:
            with self._load(memory) as llm:
                if predictor is None:
                    profile = self._known or self._measure(llm)
                    _require_same(profile, llm)
                    predictor = Predictor(profile, TraceNeeds(recorded, profile) if recorded is not None else None)
                lengths = self._lengths if llm.engine.draft is not None else [0]
                part = check_engine(
                    llm, predictor, memory, lengths, _within(depths, len(llm.engine.store.experts)), self._prompts(llm),
                    self._output_len, repeat, self._tell, ctrl_c_stops,
                )  # fmt: skip
                found.rows.extend(part.rows)
                found.sweeps.extend(part.sweeps)
        assert predictor is not None
        return predictor.profile, found

    def _load(self, memory: Size) -> Any:
        from spmoe.engine.llm import with_default_pair

        drafts = with_default_pair(self._engine)["draft"] not in (None, "none") and max(self._lengths) > 0
        k = max(_LEAST_DRAFT, *self._lengths) if drafts else 0
        return load({**self._engine, "expert_memory": memory, "num_speculative_tokens": k}, progress=True)

    def _measure(self, llm: LLM) -> EngineProfile:
        from spmoe.bench.profile_behaviour import observe
        from spmoe.bench.profile_measure import measure_profile

        k = self._lengths[0] if llm.engine.draft is not None else 0
        prompts = self._prompts(llm)
        behave = partial(observe, llm, k, prompts, self._output_len, ctrl_c_stops)
        found = measure_profile(llm.engine, behave, self._tell)
        if self._output is not None:
            found.save(self._output)  # before a check, which may take long
        return found

    def _prompts(self, llm: LLM) -> list[list[int]]:
        from spmoe.bench.profile_behaviour import PROMPT
        from spmoe.bench.profile_measure import text_tokens

        text = text_tokens(llm.engine)
        starts = [number * _APART % max(1, len(text) - PROMPT) for number in range(self._num_prompts)]
        return [text[start : start + PROMPT] for start in starts]

    def _tell(self, words: str) -> None:
        self._err.print(words, soft_wrap=True)


def _require_same(profile: EngineProfile, llm: LLM) -> None:
    """A stored profile must be of what runs here."""
    engine, subject = llm.engine, profile.subject
    here: dict[str, Any] = {
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": engine.device.type,
        "shape": engine.config.shape,
        "layers": len(engine.store.experts),
        "expert_bytes": engine.store.layout.nbytes,
        "emulated_link_gbps": engine.config.link_gbps,
    }
    if (found := subject.difference(here)) is not None:
        raise UsageError(
            f"the profile is of {found[0]}, and this engine of {found[1]}; measure one here by leaving out --from"
        )


def _within(depths: list[int] | None, layers: int) -> list[int] | None:
    """The depths asked for; without a word, none, a quarter, a half, three quarters and all."""
    return sorted({round(layers * part / 4) for part in range(5)}) if depths == [] else depths


def _depths(text: str | None) -> list[int] | None:
    """None: every; empty: not said."""
    if text is None:
        return []
    if text.strip().lower() == "every":
        return None
    found = parse_list("--cutoff", text, Cutoff.parse)
    if any(one.mode is not CutoffMode.FIXED for one in found):
        raise UsageError(
            f"--cutoff takes numbers of layers or 'every' here, not {text!r}; automatic ones are run anyway"
        )
    return [one.layers for one in found]
