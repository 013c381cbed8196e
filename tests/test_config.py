"""Configuration: accepted values, rejected values, and one-line messages for the latter."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.config import (
    DEVICES,
    DTYPES,
    MAX_AUTO_DRAFT_TOKENS,
    SHIPPED_PAIR,
    Cutoff,
    CutoffMode,
    EngineConfig,
    SamplingParams,
    Size,
    drafter_name,
    format_bytes,
    home,
)
from spmoe.errors import BudgetError, CheckpointError, PromptError, SpmoeError, UsageError
from spmoe.predict.policies import require_no_recording
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

SAMPLING_VALUES = (16, 0.0, 0, 1.0, 0.0, None, (), False, 1, None, 0.0, 0.0, 1.0, (), 0, None, None)  # one per field


def refusal(make: Any, *args: Any, **options: Any) -> str:
    """Return the message of the UsageError that `make` must raise."""
    with pytest.raises(UsageError) as caught:
        make(*args, **options)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert len(message.splitlines()) == 1
    return message


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5GiB", 2**29),
        ("10b", 10),
        ("4096", 4096),
        (4096, 4096),
        ("  8 mib ", 8 * 2**20),
        (Size(bytes=77), 77),
    ],
)
def test_sizes_in_bytes(text: str | int | Size, expected: int) -> None:
    size = Size.parse(text)
    assert size == Size(bytes=expected)
    assert size.of(10) == expected  # for any total


@given(st.one_of(st.integers(1, 2**50).map(str), st.integers(10**3, 10**8).map(lambda part: f"{part / 1e6:.6f}%")))
def test_sizes_survive_formatting_and_parsing(text: str) -> None:
    size = Size.parse(text)
    assert Size.parse(str(size)) == size


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("6GiB", "6.0 GiB"),
        ("1.5GB", "1.5 GB"),
        ("25%", "25%"),
        ("33.3333333%", "33.3333333%"),
        ("1234567", "1234567 B"),
    ],
)
def test_sizes_are_formatted_as_short_as_exactness_allows(text: str, written: str) -> None:
    assert str(Size.parse(text)) == written


@pytest.mark.parametrize("letter", ["k", "m", "g", "t"])
def test_kib_and_k_are_binary_and_kb_is_decimal(letter: str) -> None:
    power = "kmgt".index(letter) + 1
    assert Size.parse(f"3{letter}iB").bytes == 3 * 1024**power
    assert Size.parse(f"3{letter.upper()}").bytes == 3 * 1024**power
    assert Size.parse(f"3{letter.upper()}B").bytes == 3 * 1000**power


@pytest.mark.parametrize(("text", "share"), [("25%", 0.25), ("100 %", 1.0), ("0.5%", 0.005)])
def test_sizes_as_a_share(text: str, share: float) -> None:
    size = Size.parse(text)
    assert size.bytes is None
    assert size.share == pytest.approx(share)
    assert size.of(1000) == round(share * 1000)


NOT_SIZES = [
    "",
    "GiB",
    "six GiB",
    "-1GiB",
    "6 XiB",
    "6GiB!",
    "1e9",
    "nan",
    "inf",
    "25%%",
    "1.GiB",
    "6GiB\nrm",
    "six\nGiB",
]
NOT_SIZES += ["0", "0GiB", "0%", "101%", "-5%", "0.5", "0.9B", "9" * 400 + "GiB"]


@pytest.mark.parametrize("text", [*NOT_SIZES, None, True, -4096, 0, 0.25])
def test_invalid_sizes_are_rejected(text: Any) -> None:
    assert "write it as 6GiB, 512MiB or as a share such as 25%" in refusal(Size.parse, text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("0123456789.-e% \nkKMGiIbBx", max_size=8))
def test_any_text_is_a_size_or_rejected_in_one_line(text: str) -> None:
    try:
        size = Size.parse(text)
    except UsageError as error:
        lines = str(error).splitlines()
    else:
        lines = [str(size)]
        assert (size.bytes is None) != (size.share is None)
        assert (size.bytes or 0) >= 1 or 0 < (size.share or 0) <= 1
    assert len(lines) == 1


@pytest.mark.parametrize("text", ["6.0 GiB", "25%", "12.5%", "512 B", "1.5 MiB"])
def test_sizes_format_as_they_are_written(text: str) -> None:
    assert str(Size.parse(text)) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


# --- cutoffs ---


@pytest.mark.parametrize(
    ("text", "expected", "printed"),
    [
        ("auto", Cutoff(CutoffMode.AUTO), "auto"),
        (" AUTO ", Cutoff(CutoffMode.AUTO), "auto"),
        ("just-in-time", Cutoff(CutoffMode.JUST_IN_TIME), "just-in-time"),
        ("all", Cutoff(CutoffMode.ALL), "all"),
        (None, Cutoff(CutoffMode.ALL), "all"),
        ("12", Cutoff(CutoffMode.FIXED, 12), "12"),
        (0, Cutoff(CutoffMode.FIXED, 0), "0"),
        (Cutoff(CutoffMode.FIXED, 3), Cutoff(CutoffMode.FIXED, 3), "3"),
    ],
)
def test_cutoffs_are_parsed_and_formatted(text: str | int | Cutoff | None, expected: Cutoff, printed: str) -> None:
    assert Cutoff.parse(text) == expected
    assert str(expected) == printed
    assert Cutoff.parse(printed) == expected


@pytest.mark.parametrize("text", ["", "-1", -1, "1.5", 2.0, "none", "fixed", "auto 3", True, "²", "one\ntwo"])
def test_invalid_cutoffs_are_rejected(text: Any) -> None:
    assert "write auto, just-in-time, all or a number of layers" in refusal(Cutoff.parse, text)


# --- sampling ---


def test_sampling_defaults_are_greedy() -> None:
    sampling = SamplingParams()
    assert sampling.greedy
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0, 1.0, 0.0, None)
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 1e300},
        {"top_p": 1},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"top_k": 10**9},
        {"top_k": -1},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"n": 3, "temperature": 1.0},
        {"logprobs": 0},
        {"logprobs": -1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-3},
        {"stop_token_ids": (3, 0)},
        {"min_tokens": 4, "max_tokens": 4},
        {"logit_bias": {3: -100.0, 0: 100.0}},
        {"max_tokens": np.int64(5), "temperature": np.float32(0.5)},
    ],
)
def test_sampling_accepts_the_ends_of_its_ranges(options: dict[str, Any]) -> None:
    sampling = SamplingParams(**options)
    assert {name: getattr(sampling, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"max_tokens": "5"}, "max_tokens must be a whole number, not '5'"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"max_tokens": True}, "max_tokens must be a whole number, not True"),
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or more, not nan"),
        ({"temperature": math.inf}, "temperature must be 0 or more"),
        ({"temperature": "hot\nhotter"}, "temperature must be a number"),
        ({"top_k": -2}, "top_k must be -1 or 0 (off) or more, not -2"),
        ({"top_k": 2.0}, "top_k must be a whole number, not 2.0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
        ({"top_p": None}, "top_p must be a number, not None"),
        ({"min_p": -0.01}, "min_p must be between 0 and 1, not -0.01"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, not 1.5"),
        ({"min_p": math.nan}, "min_p must be between 0 and 1, not nan"),
        ({"seed": -1}, "seed must be from 0 to 2**63-1, not -1"),
        ({"seed": 2**63}, "seed must be from 0 to 2**63-1"),
        ({"seed": 1.0}, "seed must be a whole number, not 1.0"),
        ({"stop": ""}, "stop must not contain an empty string"),
        ({"stop": ["a", ""]}, "stop must not contain an empty string"),
        ({"stop": ["a", 3]}, "stop must be text or a list of texts"),
        ({"stop": 5}, "stop must be text or a list of texts, not 5"),
        ({"stop": b"ab"}, "stop must be text or a list of texts"),
        ({"n": 0, "temperature": 1.0}, "n must be at least 1, not 0"),
        ({"n": 2}, "n must be 1 with temperature 0, not 2"),
        ({"logprobs": -2}, "logprobs must be -1 (all) or more, not -2"),
        ({"logprobs": True}, "logprobs must be a whole number, not True"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2, not 2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be from -2 to 2, not nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be above 0, not inf"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids, not [-1]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids, not ['a']"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, 4, not 5"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers, not [1]"),
        ({"logit_bias": {"a": 1}}, "'a' is not a token id"),
        ({"logit_bias": {-1: 1}}, "-1 is not a token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "is not a token id"),
        ({"logit_bias": {"\u0663": 1}}, "is not a token id"),
        ({"logit_bias": {1: 101}}, "logit_bias must be from -100 to 100, not 101 for token 1"),
        ({"logit_bias": {1: "x"}}, "logit_bias must be from -100 to 100, not 'x' for token 1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be from -100 to 100, not nan"),
    ],
)
def test_invalid_sampling_is_rejected(options: dict[str, Any], says: str) -> None:
    assert says in refusal(SamplingParams, **options)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), ("a\nb", ("a\nb",))],
)
def test_stop_strings_are_always_a_tuple(stop: Any, expected: tuple[str, ...]) -> None:
    sampling = SamplingParams(stop=stop)
    assert sampling.stop_strings == expected
    assert sampling.stop == expected
    assert hash(sampling) == hash(SamplingParams(stop=expected))


def test_token_ids_of_json_are_read() -> None:
    """JSON has text keys and lists only."""
    sampling = SamplingParams(logit_bias={"17": 2}, stop_token_ids=[4, 5])
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({17: 2.0}, (4, 5))
    assert hash(sampling) == hash(SamplingParams(stop_token_ids=(4, 5)))
    assert sampling != SamplingParams(stop_token_ids=(4, 5))


# --- engine ---


def test_engine_options_are_parsed_from_text() -> None:
    config = EngineConfig.make(
        model="target", draft="none", num_speculative_tokens=0, expert_memory="6GiB", cutoff="12", link_gbps=16
    )
    assert config == EngineConfig(
        model="target",
        draft=None,
        num_speculative_tokens=0,
        expert_memory=Size(bytes=6 * 2**30),
        cutoff=Cutoff(CutoffMode.FIXED, 12),
        link_gbps=16,
    )


def test_engine_defaults() -> None:
    config = EngineConfig.make(model="target")
    assert config == EngineConfig("target")
    assert config.cutoff == Cutoff(CutoffMode.AUTO)
    assert (config.expert_memory, config.device_memory) == (None, "auto")
    assert EngineConfig.make(model="target", device_memory=None).device_memory == "auto"
    assert EngineConfig.make(model="target", draft="small").draft == "small"
    assert EngineConfig.make(model="target", draft=Path("here/small")).draft == str(Path("here/small"))
    assert EngineConfig.make(model="target", cutoff=None).cutoff == Cutoff(CutoffMode.ALL)


def test_automatic_draft_is_the_included_one_for_the_included_target(tmp_path: Path) -> None:
    target, draft = SHIPPED_PAIR / "target", str(SHIPPED_PAIR / "draft")
    (tmp_path / "link").symlink_to(target)
    for model in (target, str(target), tmp_path / "link", SHIPPED_PAIR / "draft" / ".." / "target"):
        config = EngineConfig.make(model=model)
        assert (config.draft, config.resolved_draft, config.draft_model) == ("auto", draft, draft)
    for name in ("target", "owner/name", "~nobody/target", "a\0b", str(SHIPPED_PAIR / "draft")):
        config = EngineConfig.make(model=name)
        assert (config.resolved_draft, config.draft_model, config.self_draft_scheme) == ("ngram", None, None)
    config = EngineConfig.make(model=target, draft=None)
    assert (config.draft, config.resolved_draft, config.draft_model) == (None, None, None)
    assert drafter_name("auto") == ("auto", "")


def test_draft_tokens_are_zero_by_default_without_a_draft() -> None:
    for draft in (None, "none"):
        assert EngineConfig.make(model="target", draft=draft).num_speculative_tokens == 0
        assert EngineConfig.make(model="target", draft=draft, num_speculative_tokens=None).num_speculative_tokens == 0
        assert EngineConfig.make(model="target", draft=draft, num_speculative_tokens=4).num_speculative_tokens == 4
    for options in ({}, {"draft": "auto"}, {"draft": "ngram"}, {"num_speculative_tokens": None}):
        assert EngineConfig.make(model="target", **options).num_speculative_tokens == "auto"


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("eviction", ("auto", *EVICTION_POLICIES.names())),
        ("dtype", DTYPES),
        ("device", DEVICES),
    ],
)
def test_options_with_named_values(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(EngineConfig.make(model="target", **{name: choice}), name) == choice
    for wrong in ("sometimes", "", choices[0].upper(), None, "a\nb"):
        message = refusal(EngineConfig.make, model="target", **{name: wrong})
        assert message.startswith(f"{name} must be one of {', '.join(choices)}, not ")


@pytest.mark.parametrize(
    ("prefetch", "eviction", "policy"),
    [
        ("draft-gate", "auto", "draft-informed"),
        ("draft-gate+next-gate", "auto", "draft-informed"),
        ("next-gate", "auto", "draft-informed"),
        ("on-demand", "auto", "draft-informed"),
        ("oracle", "auto", "draft-informed"),
        ("activation", "auto", "activation"),
        ("adaptive", "auto", "adaptive"),
        ("adaptive", "lru", "lru"),
        ("next-gate", "lru-per-layer", "lru-per-layer"),
    ],
)
def test_eviction_auto_is_the_one_that_the_prefetch_policy_declares(prefetch: str, eviction: str, policy: str) -> None:
    assert EngineConfig.make(model="target", prefetch=prefetch, eviction=eviction).eviction_policy == policy


@pytest.mark.parametrize("prefetch", [*PREFETCH_POLICIES.names(), "draft-gate+next-gate", "activation+adaptive"])
def test_prefetch_is_a_registered_policy_or_several_joined(prefetch: str) -> None:
    assert EngineConfig.make(model="target", prefetch=prefetch).prefetch == prefetch


@pytest.mark.parametrize(
    "wrong",
    ["sometimes", "", "ACTIVATION", None, "a\nb", "draft-gate+", "+", "draft-gate+magic", "lru", "oracle+oracle"],
)
def test_unknown_prefetch_policy_is_refused_with_all_names(wrong: str | None) -> None:
    message = refusal(EngineConfig.make, model="target", prefetch=wrong)
    names = ", ".join(PREFETCH_POLICIES.names())
    assert message == f"prefetch must be one of {names}, or several of them joined by +, not {str(wrong)!r}"


def test_only_policies_that_need_recorded_routing_are_refused_without_a_recording() -> None:
    for prefetch in (*PREFETCH_POLICIES.names(), "draft-gate+next-gate"):
        if prefetch == "oracle":
            assert "spmoe bench" in refusal(require_no_recording, prefetch)
        else:
            require_no_recording(prefetch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be from 0 to 64, not -1"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be from 0 to 64, not 65"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens must be a whole number, not 2.5"),
        ({"num_speculative_tokens": "four"}, "num_speculative_tokens must be a whole number or auto, not 'four'"),
        ({"num_speculative_tokens": "-4"}, "num_speculative_tokens must be from 0 to 64, not -4"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, not 0"),
        ({"prefill_chunk": None}, "prefill_chunk must be a whole number, not None"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, not 1"),
        ({"max_model_len": 10.0}, "max_model_len must be a whole number, not 10.0"),
        ({"link_gbps": 0}, "link_gbps must be a speed above 0, not 0"),
        ({"link_gbps": -16.0}, "link_gbps must be a speed above 0, not -16.0"),
        ({"link_gbps": math.inf}, "link_gbps must be a speed above 0, not inf"),
        ({"link_gbps": math.nan}, "link_gbps must be a speed above 0, not nan"),
        ({"link_gbps": "fast"}, "link_gbps must be a number, not 'fast'"),
        ({"expert_memory": "lots"}, "'lots' is not a size; write it as"),
        ({"cutoff": "deep"}, "'deep' is not a cutoff; write"),
        ({"device_memory": "lots"}, "'lots' is not a size; write it as"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number, not True"),
        ({"pin_memory": 1}, "pin_memory must be true or false, not 1"),
        ({"cpu_experts": "on"}, "cpu_experts must be off, auto or a number of threads from 1 to 1024, not 'on'"),
        ({"cpu_experts": 0}, "cpu_experts must be off, auto or a number of threads from 1 to 1024, not 0"),
        ({"cpu_experts": True}, "cpu_experts must be off, auto or a number of threads from 1 to 1024, not True"),
        ({"verify_experts": "never"}, "verify_experts must be one of once, sample, always, not 'never'"),
        ({"overlap": "yes"}, "overlap must be true or false, not 'yes'"),
        ({"draft": 3}, "draft must be a directory, hub id or name, not 3"),
        ({"draft": "self:int5"}, "draft must be self:int8 or self:int4, not 'self:int5'"),
        ({"shape": 3}, "shape must be text, not 3"),
        ({"model": None}, "model must be a directory or hub id, not None"),
    ],
)
def test_invalid_engine_options_are_rejected(options: dict[str, Any], says: str) -> None:
    assert says in refusal(EngineConfig.make, **{"model": "target", **options})


def test_draft_tokens_are_a_number_or_auto() -> None:
    for text, expected, most in (
        (" AUTO", "auto", MAX_AUTO_DRAFT_TOKENS),
        ("8", 8, 8),
        (0, 0, 0),
        (np.int64(64), 64, 64),
    ):
        config = EngineConfig.make(model="target", num_speculative_tokens=text)
        assert (config.num_speculative_tokens, config.max_draft_tokens) == (expected, most)


def test_drafts_with_and_without_a_checkpoint() -> None:
    drafts = {
        draft: EngineConfig.make(model="target", draft=draft)
        for draft in (None, "none", "ngram", "self:int8", "self:int4", "a/model")
    }
    assert {name: config.draft_model for name, config in drafts.items() if config.draft_model} == {"a/model": "a/model"}
    schemes = {name: config.self_draft_scheme for name, config in drafts.items() if config.self_draft_scheme}
    assert schemes == {"self:int8": "int8", "self:int4": "int4"}
    for draft in ("a/model", "self:int8"):
        config = EngineConfig.make(model="target", draft=draft, num_speculative_tokens=0)
        assert (config.draft_model, config.self_draft_scheme) == (None, None)


def test_positional_and_missing_values_are_named_in_errors() -> None:
    assert refusal(SamplingParams, 16, -1.0) == "temperature must be 0 or more, not -1.0"
    assert refusal(EngineConfig) == "model is missing; give it"
    assert refusal(SamplingParams, *SAMPLING_VALUES, 1).startswith("there are 17 options, and more values were given: ")


def test_the_first_of_several_problems_is_reported() -> None:
    assert refusal(SamplingParams, max_tokens=0, top_p=2.0, min_p=3.0) == "max_tokens must be at least 1, not 0"


def test_unknown_options_are_rejected_with_the_known_ones_listed() -> None:
    for make in (EngineConfig.make, EngineConfig):
        message = refusal(make, model="target", prefech="on-demand", zeal=1)
        assert message.startswith("unknown option prefech, zeal; the options are ")
        for field in dataclasses.fields(EngineConfig):  # type: ignore[arg-type]
            assert field.name in message
    assert refusal(SamplingParams, temprature=1.0).startswith("unknown option temprature; the options are frequency_")


@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        (Size(bytes=1), "bytes"),
        (Cutoff(CutoffMode.AUTO), "layers"),
        (SamplingParams(), "temperature"),
        (EngineConfig("target"), "model"),
    ],
)
def test_configuration_is_frozen_and_hashable(configuration: Any, name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(configuration, name, 1)
    with pytest.raises((AttributeError, TypeError)):
        configuration.misspelt = 1
    assert hash(configuration) == hash(dataclasses.replace(configuration))


def test_replaced_values_are_validated() -> None:
    assert "top_p" in refusal(dataclasses.replace, SamplingParams(), top_p=2.0)
    assert "dtype" in refusal(dataclasses.replace, EngineConfig("target"), dtype="int4")


# --- cache directory and exit codes ---


def test_home_is_spmoe_home_then_the_xdg_cache_then_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "explicit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "explicit"
    monkeypatch.setenv("SPMOE_HOME", "~/mine")
    assert home() == tmp_path / "mine"
    monkeypatch.delenv("SPMOE_HOME")
    assert home() == tmp_path / "xdg" / "spmoe"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert home() == tmp_path / ".cache" / "spmoe"


def test_usage_errors_exit_with_2_and_others_with_1() -> None:
    assert {e.exit_code for e in (UsageError, BudgetError, PromptError)} == {2}
    assert {e.exit_code for e in (SpmoeError, CheckpointError)} == {1}
    assert issubclass(UsageError, SpmoeError)


@pytest.mark.parametrize(("value", "expected"), [("off", "off"), (" AUTO ", "auto"), ("12", 12), (3, 3)])
def test_cpu_experts_are_threads_or_a_word(value: object, expected: object) -> None:
    assert EngineConfig.make(model="m", cpu_experts=value).cpu_experts == expected
