"""Structured outputs: masks that keep the output within a JSON schema, a regular expression, choices or a grammar.

llguidance compiles constraints and computes the masks. Target and draft choose their tokens with the same masks, so the
output is that of plain decoding. Drafts of another kind may contain tokens that the grammar forbids. The target rejects
those, so the rows behind them need no mask.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spmoe.config import StructuredOutputsParams
from spmoe.errors import UsageError, panics_as_errors, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_LENGTH = 2**16  # characters of a constraint
MAX_GBNF_LENGTH = 2**14  # the time of its conversion grows with the square of its length
MAX_LEXER_FUEL = 300_000  # effort of building a regular expression; llguidance's unit
MAX_LEXER_STATES = 50_000  # of one request, 1 to 2 kB each
# llguidance recurses along references and rules, and a stack overflow would end the process. A constraint of
# MAX_SOURCE_LENGTH needs about 120 MiB. Pages that are not touched take no memory.
_STACK_BYTES = 2**29
_LARK = re.compile(r"^[ \t]*(start\s{0,9}:|%llguidance\b)", re.MULTILINE)  # what a grammar in Lark's syntax must have
_CACHED = 32  # compiled grammars
T = TypeVar("T")
# At most one space or line break with indentation between two JSON tokens: with any white space, a model that prefers
# it would write nothing else until max_tokens.
JSON_WHITESPACE = r" |\n[ \t]{0,20}"


class Grammar:
    """A compiled constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher  # in its initial state
        self.vocab_size = vocab_size  # width of the logits, which may exceed the tokenizer's vocabulary

    def new_matcher(self) -> LLMatcher:
        """Return a matcher in its initial state."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles constraints for one tokenizer, and keeps the latest ones. Thread-safe.

    `tokenizer_json` returns the tokenizer as text in the format of tokenizer.json.
    """

    def __init__(self, tokenizer_json: Callable[[], str], eos_tokens: Collection[int], vocab_size: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_tokens = sorted(token for token in eos_tokens if token < vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None  # made with the first constraint: it takes up to a second
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams, name: str | None = None) -> Grammar:
        """Return a compiled constraint; raise UsageError if that cannot be done.

        `name`: what to call the constraint in errors, by default the field that is set.
        """
        with self._lock:
            if (grammar := self._grammars.get(params)) is None:
                grammar = self._compile(params, name or f"structured_outputs.{params.kind}")
                self._grammars[params] = grammar
            self._grammars.move_to_end(params)
            while len(self._grammars) > _CACHED:
                self._grammars.popitem(last=False)
            return grammar

    def _compile(self, params: StructuredOutputsParams, name: str) -> Grammar:
        llguidance = _import_llguidance()
        kind, source = _source(params)
        if len(source) > (limit := MAX_GBNF_LENGTH if kind == "gbnf" else MAX_SOURCE_LENGTH):
            raise UsageError(f"{name} has {len(source)} characters, and the limit is {limit}; shorten it")
        tokenizer = self._tokenizer = self._tokenizer or self._load_tokenizer(llguidance)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=MAX_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )

        def build() -> tuple[LLMatcher, str]:
            with panics_as_errors():
                made = _to_llguidance(llguidance, kind, source)
                matcher = llguidance.LLMatcher(tokenizer, made, log_level=0, limits=limits)
                trial = matcher.deep_copy()
                trial.compute_bitmask()  # finds constraints that no text fulfils
                return matcher, trial.get_error()

        try:
            matcher, failure = _run_with_large_stack(build)
        except (ValueError, RuntimeError, RecursionError) as error:
            raise UsageError(f"{name} cannot be used ({reason(error)}); change it") from error
        if failure:
            raise UsageError(f"{name} cannot be used ({reason(ValueError(failure))}); change it")
        return Grammar(matcher, self._vocab_size)

    def _load_tokenizer(self, llguidance: Any) -> LLTokenizer:
        if not self._eos_tokens:
            raise UsageError(
                "structured_outputs needs an end-of-text token, which ends the output; this model declares none in "
                "generation_config.json or its tokenizer"
            )
        text = self._tokenizer_json()
        try:
            with panics_as_errors():
                found: LLTokenizer = llguidance.LLTokenizer(text, eos_token=self._eos_tokens)
        except Exception as error:  # llguidance documents no type
            raise UsageError(
                f"structured_outputs does not work with this model: llguidance cannot read its tokenizer "
                f"({reason(error)}); leave it out"
            ) from error
        return found


class GrammarMask:
    """Position of one sequence in its grammar.

    It follows any history: tokens that a draft tried are rolled back when another call comes without them.
    """

    def __init__(self, grammar: Grammar, end_tokens: Collection[int]) -> None:
        self._grammar = grammar
        self._matcher = grammar.new_matcher()
        self._end_tokens = sorted(token for token in end_tokens if token < grammar.vocab_size)
        self._path: list[int] = []  # tokens that the matcher has consumed
        self._forbidden: dict[int, Tensor] = {}  # bool [vocabulary] by number of tokens of the path
        self._failed: list[int] | None = None  # output after which llguidance gave up
        self._failure = ""

    def apply(self, scores: Tensor, output: list[int], draft: list[int]) -> None:
        """Set the scores of forbidden tokens to minus infinity, in place.

        The last row follows the output and the draft tokens, each earlier row one draft token less.
        """
        # scores: [rows, vocabulary]
        self._forbidden = {length: mask for length, mask in self._forbidden.items() if length >= len(output)}
        tokens = [*output, *draft]
        for row in range(len(scores)):
            forbidden = self._forbidden_after(tokens[: len(tokens) - len(scores) + 1 + row])
            if forbidden is None:
                return
            scores[row].masked_fill_(forbidden, float("-inf"))

    def require_within_limits(self, output: list[int]) -> None:
        """Raise UsageError if llguidance gave up at a token of this output; the token is then an end token."""
        if self._failed is not None and len(output) > len(self._failed) and self._continues(output, self._failed):
            raise UsageError(
                f"structured_outputs exceeded a limit of llguidance after {len(self._failed)} tokens "
                f"({self._failure}); simplify the constraint"
            )

    def _forbidden_after(self, tokens: list[int]) -> Tensor | None:
        """Return the forbidden tokens after some; None if these already violate the grammar, or end the output."""
        # -> bool [vocabulary]
        if self._failed is not None and self._continues(tokens, self._failed):
            return self._all_but_end_tokens() if len(tokens) == len(self._failed) else None
        reached = self._move_to(tokens)
        if reached and len(tokens) not in self._forbidden:
            self._forbidden[len(tokens)] = self._compute()
        if self._matcher.is_error():  # a matcher does not leave this state
            self._failed, self._failure = tokens, reason(ValueError(self._matcher.get_error()))
            self._matcher, self._path, self._forbidden = self._grammar.new_matcher(), [], {}
            return self._all_but_end_tokens()
        return self._forbidden[len(tokens)] if reached else None

    def _move_to(self, tokens: list[int]) -> bool:
        """Let the matcher consume exactly these tokens; return False if it does not accept one of them."""
        common = len(self._path)
        if not self._continues(tokens, self._path):
            pairs = zip(self._path, tokens, strict=False)
            differing = (number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
            common = next(differing, len(tokens))
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
            self._forbidden = {length: mask for length, mask in self._forbidden.items() if length <= common}
        for token in tokens[common:]:
            if token in self._end_tokens or not self._matcher.validate_tokens([token]):
                return False
            if not self._matcher.consume_token(token):
                return False
            self._path.append(token)
        return True

    def _compute(self) -> Tensor:
        """Return the tokens that are forbidden now."""  # bool [vocabulary]
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits)[: self._grammar.vocab_size]
        forbidden = torch.ones(self._grammar.vocab_size, dtype=torch.bool)
        forbidden[: len(allowed)] = allowed == 0
        if self._matcher.is_accepting():
            forbidden[self._end_tokens] = False
        return forbidden

    def _all_but_end_tokens(self) -> Tensor:
        forbidden = torch.ones(self._grammar.vocab_size, dtype=torch.bool)
        forbidden[self._end_tokens] = False
        return forbidden

    @staticmethod
    def _continues(tokens: list[int], start: list[int]) -> bool:
        return tokens[: len(start)] == start


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "structured_outputs needs llguidance, not installed here; install with pip install 'spmoe[guidance]'"
        ) from error
    return llguidance


def _source(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return llguidance's name for a kind of constraint, and the constraint as text."""
    if params.grammar is not None:
        return "lark" if _LARK.search(params.grammar) else "gbnf", params.grammar
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        return "choice", json.dumps(list(params.choice))
    return "json", str(params.json or '{"type": "object"}')


def _to_llguidance(llguidance: Any, kind: str, source: str) -> str:
    """Return a constraint in llguidance's own form."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    made: str = (
        llguidance.LLMatcher.grammar_from_json_schema(source, defaults=options)
        if kind == "json"
        else llguidance.grammar_from(kind, source)
    )
    return made


def _run_with_large_stack(function: Callable[[], T]) -> T:
    """Run a function on a thread with a large stack."""
    previous = threading.stack_size(_STACK_BYTES)  # of all threads that start from now on
    try:
        with ThreadPoolExecutor(1, "spmoe-grammar") as executor:
            return executor.submit(function).result()
    finally:
        threading.stack_size(previous)
