"""Options that verbs share: all are listed but those that a verb would ignore."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from spmoe.cli.options import takes_shared_options, takes_shared_options_except

if TYPE_CHECKING:
    from conftest import Invoke


@pytest.mark.parametrize(
    ("verb", "ignored", "heeded"),
    [
        (("predictability",), ("--prefetch", "--cutoff", "--no-overlap"), ("--projection", "--eviction")),
        (("fit-predictor",), ("--prefetch", "--cutoff", "--no-overlap", "--projection"), ("--draft", "--dtype")),
        (("profile",), ("--prefetch",), ("--cutoff", "--no-overlap", "--eviction")),
        (("trace", "record"), ("--enforce-eager",), ("--prefetch", "--cutoff", "--max-tokens")),
        (("run",), (), ("--prefetch", "--cutoff", "--no-overlap", "--projection", "--enforce-eager")),
    ],
)
def test_what_is_ignored_is_not_listed(
    invoke: Invoke, verb: tuple[str, ...], ignored: tuple[str, ...], heeded: tuple[str, ...]
) -> None:
    words = invoke(*verb, "--help").succeeded().out.split()
    assert not [option for option in ignored if option in words]
    assert not [option for option in heeded if not any(word.startswith(option) for word in words)]
    for option in ignored:
        invoke(*verb, option, "draft-gate").refused(2, option)


def test_options_are_left_out_by_name() -> None:
    def verb(engine: dict[str, Any], device: str = "here") -> None:
        """Does nothing."""
        seen.update(engine)

    seen: dict[str, Any] = {}
    every = set(inspect.signature(takes_shared_options(verb)).parameters)
    fewer = takes_shared_options_except("prefetch", "cutoff")(verb)
    assert every - set(inspect.signature(fewer).parameters) == {"prefetch", "cutoff"}
    given = {name: one.default for name, one in inspect.signature(fewer).parameters.items()}
    fewer(**{**given, "draft": "ngram"})
    assert (seen["draft"], seen["prefetch"], str(seen["cutoff"])) == ("ngram", "draft-gate", "auto"), "as by default"
    with pytest.raises(ValueError, match="no shared option is called colour"):
        takes_shared_options_except("colour")(verb)
