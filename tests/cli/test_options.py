"""Shared options: every command lists those that have an effect on it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from spmoe.cli.options import takes_shared_options, takes_shared_options_except
from spmoe.config import EngineConfig

if TYPE_CHECKING:
    from conftest import Invoke


@pytest.mark.parametrize(
    ("verb", "ignored", "used"),
    [
        (("predictability",), ("--prefetch", "--cutoff", "--no-overlap"), ("--projection", "--eviction")),
        (("fit-predictor",), ("--prefetch", "--cutoff", "--no-overlap", "--projection"), ("--draft", "--dtype")),
        (("profile",), ("--prefetch",), ("--cutoff", "--no-overlap", "--eviction")),
        (("trace", "record"), ("--enforce-eager",), ("--prefetch", "--cutoff", "--max-tokens")),
        (("run",), (), ("--prefetch", "--cutoff", "--no-overlap", "--projection", "--enforce-eager")),
    ],
)
def test_options_without_effect_are_not_listed(
    invoke: Invoke, verb: tuple[str, ...], ignored: tuple[str, ...], used: tuple[str, ...]
) -> None:
    words = invoke(*verb, "--help").succeeded().out.split()
    assert not [option for option in ignored if option in words]
    assert not [option for option in used if not any(word.startswith(option) for word in words)]
    for option in ignored:
        invoke(*verb, option, "draft-gate").refused(2, option)


def test_defaults_of_the_command_line_are_those_of_the_configuration() -> None:
    def verb(engine: dict[str, Any]) -> None:
        """Do nothing."""

    parameters = inspect.signature(takes_shared_options(verb)).parameters
    defaults = {name: one.default for name, one in parameters.items()}
    assert EngineConfig.make(**{**defaults, "model": "target"}) == EngineConfig("target")


def test_shared_options_are_excluded_by_name() -> None:
    def verb(engine: dict[str, Any], device: str = "here") -> None:
        """Do nothing."""
        given_engine.update(engine)

    given_engine: dict[str, Any] = {}
    every = set(inspect.signature(takes_shared_options(verb)).parameters)
    fewer = takes_shared_options_except("prefetch", "cutoff")(verb)
    assert every - set(inspect.signature(fewer).parameters) == {"prefetch", "cutoff"}
    given = {name: one.default for name, one in inspect.signature(fewer).parameters.items()}
    fewer(**{**given, "draft": "ngram"})
    assert given_engine["draft"] == "ngram"
    assert (given_engine["prefetch"], given_engine["cutoff"]) == ("auto", "auto"), "excluded: keep their defaults"
    with pytest.raises(ValueError, match="no shared option is called colour"):
        takes_shared_options_except("colour")(verb)
