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
MAX_GRAMMAR_LINES = 500  # rules are on lines of their own; the time of an error in one grows with their number
MAX_LEXER_FUEL = 300_000  # effort of building a regular expression; llguidance's unit
MAX_LEXER_STATES = 20_000  # of a grammar, 1 to 2 kB each
MAX_REBUILDS = 8  # of a grammar for one request: each takes up to a second, and others wait
# llguidance recurses along references and rules, and a stack overflow would end the process. A constraint of
# MAX_SOURCE_LENGTH needs about 120 MiB. Pages that are not touched take no memory.
_STACK_BYTES = 2**29
_LARK = re.compile(r"^[ \t]*(start\s{0,9}:|%llguidance\b)", re.MULTILINE)  # what a grammar in Lark's syntax must have
_CACHED = 16  # compiled grammars
T = TypeVar("T")
# At most one space or line break with indentation between two JSON tokens: with any white space, a model that prefers
# it would write nothing else until max_tokens.
JSON_WHITESPACE = r" |\n[ \t]{0,20}"


class Grammar:
    """A compiled constraint.

    Its matchers share the states of one lexer, which are built as they are needed. So a limit that one matcher exceeds
    concerns all of them, until the grammar is built again.
    """

    def __init__(self, build: Callable[[], LLMatcher], vocab_size: int) -> None:
        self._build = build
        self.rebuild()
        self.vocab_size = vocab_size  # width of the logits, which may exceed the tokenizer's vocabulary

    def rebuild(self) -> None:
        """Start again without lexer states, for new matchers."""
        self._matcher = _run_with_large_stack(self._build)

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
        if params.grammar is not None and (lines := len(source.splitlines())) > MAX_GRAMMAR_LINES:
            raise UsageError(f"{name} has {lines} lines, and the limit is {MAX_GRAMMAR_LINES}; shorten it")
        tokenizer = self._tokenizer = self._tokenizer or self._load_tokenizer(llguidance)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=MAX_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )

        def build() -> LLMatcher:
            with panics_as_errors():
                made = _to_llguidance(llguidance, kind, source)
                matcher: LLMatcher = llguidance.LLMatcher(tokenizer, made, log_level=0, limits=limits)
                trial = matcher.deep_copy()
                trial.compute_bitmask()  # finds constraints that no text fulfils
                if failure := trial.get_error():
                    raise ValueError(failure)
                return matcher

        try:
            return Grammar(build, self._vocab_size)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{name} cannot be used ({reason(error)}); change it") from error

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


class _LimitError(Exception):
    """llguidance gave up: a limit is exceeded."""


class GrammarMask:
    """Position of one sequence in its grammar.

    It follows any history: tokens that a draft tried are rolled back when another call comes without them.
    """

    def __init__(self, grammar: Grammar, end_tokens: Collection[int]) -> None:
        self._grammar = grammar
        self._end_tokens = sorted(token for token in end_tokens if token < grammar.vocab_size)
        self._matcher = grammar.new_matcher()
        self._path: list[int] = []  # tokens that the matcher has consumed
        self._forbidden: dict[int, Tensor] = {}  # bool [vocabulary] by number of tokens of the path
        self._failed: list[int] | None = None  # output after which llguidance gave up
        self._failure = ""
        self._rebuilds = 0

    def apply(self, scores: Tensor, output: list[int], draft: list[int]) -> None:
        """Set the scores of forbidden tokens to minus infinity, in place.

        The last row follows the output and the draft tokens, each earlier row one draft token less.
        """
        # scores: [rows, vocabulary]
        self._forbidden = {length: mask for length, mask in self._forbidden.items() if length >= len(output)}
        tokens = [*output, *draft]
        for row in range(len(scores)):
            forbidden = self._forbidden_after(tokens[: len(tokens) - len(scores) + 1 + row], len(output))
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

    def _forbidden_after(self, tokens: list[int], certain: int) -> Tensor | None:
        """Return the forbidden tokens after some, of which the first `certain` are part of the output.

        None if these already violate the grammar, or end the output.
        """
        # -> bool [vocabulary]
        if self._failed is not None and self._continues(tokens, self._failed):
            return self._all_but_end_tokens() if len(tokens) == len(self._failed) else None
        for rebuilt in (False, True):
            try:
                return self._follow(tokens, certain)
            except _LimitError as error:
                self._failure = reason(error)
            if rebuilt or self._rebuilds == MAX_REBUILDS:
                break
            self._rebuilds += 1  # other sequences and rejected drafts share the lexer: count only this one's states
            self._grammar.rebuild()
            self._restart()
        self._failed = tokens
        self._restart()
        return self._all_but_end_tokens()

    def _restart(self) -> None:
        self._matcher, self._path, self._forbidden = self._grammar.new_matcher(), [], {}

    def _follow(self, tokens: list[int], certain: int) -> Tensor | None:
        """Let the matcher consume exactly these tokens; return those that are forbidden then, None as above."""
        common = len(self._path)
        if not self._continues(tokens, self._path):
            pairs = zip(self._path, tokens, strict=False)
            differing = (number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
            common = next(differing, len(tokens))
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
            self._forbidden = {length: mask for length, mask in self._forbidden.items() if length <= common}
        for number in range(common, len(tokens)):
            token = tokens[number]
            if number >= certain and (token in self._end_tokens or self._current()[token]):
                return None
            self._matcher.consume_token(token)
            self._check_limits()
            self._path.append(token)
        return self._current()

    def _current(self) -> Tensor:
        """Return the tokens that are forbidden after the path."""  # bool [vocabulary]
        if (length := len(self._path)) not in self._forbidden:
            self._forbidden[length] = self._compute()
            self._check_limits()
        return self._forbidden[length]

    def _check_limits(self) -> None:
        if self._matcher.is_error():  # a matcher does not leave this state
            raise _LimitError(self._matcher.get_error())

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
