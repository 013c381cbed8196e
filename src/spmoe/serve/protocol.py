"""Requests as OpenAI's API and vLLM define them, checked.

A field that the server does not know, or does not support, is refused by its name. Sampling fields are checked by
`SamplingParams`, whose names they have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from spmoe.config import SamplingParams, StructuredOutputsParams
from spmoe.engine.prompts import ParsedPrompt, parse_prompts
from spmoe.errors import SpmoeError, UsageError
from spmoe.serve.http import ApiError
from spmoe.serve.tools import hermes_grammar

MAX_COMPLETIONS = 128  # `n`, as in OpenAI's API
MAX_LOGPROBS = 20  # most likely tokens per position, as in OpenAI's and vLLM's
MAX_MESSAGES = 8192  # and tool calls in them; rendering more of them keeps other requests waiting
MAX_PROMPTS = 8192  # millions of them would keep other requests waiting before they are refused
MAX_TOOLS = 1024
MAX_STOP_STRINGS = 16  # each is searched for after every token
MAX_STOP_LENGTH = 1024  # characters
DEFAULT_COMPLETION_TOKENS = 16  # `max_tokens` of /v1/completions, as in OpenAI's and vLLM's

_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {  # values without an effect; advice
    "add_generation_prompt": ((True,), "chats always end with the prompt for an answer"),
    "audio": ((), "the server generates text only"),
    "best_of": ((1,), "use n"),
    "cache_prompt": ((True,), "the server's --no-enable-prefix-caching has this effect"),
    "continue_final_message": ((False,), "an answer is always a new message"),
    "echo": ((False,), "the prompt is not part of the completion"),
    "frequency_penalties": ((), "use frequency_penalty"),
    "function_call": (("none",), "use tool_choice"),
    "functions": (([],), "use tools"),
    "include_stop_str_in_output": ((False,), "a stop text is not part of the output"),
    "length_penalty": ((1,), "there is no beam search"),
    "metadata": (({},), "completions are not stored"),
    "modalities": ((["text"],), "the server generates text only"),
    "moderation": ((), "leave it out"),
    "prediction": ((), "drafts are chosen with --draft when the server starts"),
    "priority": ((0,), "requests run in order of arrival"),
    "prompt_cache_retention": ((), "leave it out"),
    "return_token_ids": ((False,), "leave it out"),
    "service_tier": (("auto", "default"), "leave it out"),
    "skip_special_tokens": ((True,), "special tokens are not part of the text"),
    "spaces_between_special_tokens": ((True,), "special tokens are not part of the text"),
    "store": ((False,), "completions are not stored"),
    "suffix": (("",), "text is completed at its end only"),
    "use_beam_search": ((False,), "there is no beam search"),
    "verbosity": (("medium",), "leave it out"),
    "web_search_options": ((), "leave it out"),
}


def bad_request(error: SpmoeError) -> ApiError:
    """Return the answer to a request that was refused before it ran; its message often begins with the field."""
    first = re.split(r"\W", str(error), maxsplit=1)[0]
    known = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    return ApiError(400, str(error), param=first if first in known else None)


class _Model(BaseModel):
    """Base of all objects in requests: unknown keys and wrong types are errors, null means not given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _prompts(given: Any) -> list[ParsedPrompt]:
    form = "prompt must be text, a list of texts, a list of token ids, or a list of such lists"
    if not isinstance(given, (str, list)) or (isinstance(given, list) and any(isinstance(one, dict) for one in given)):
        raise UsageError(form)
    if isinstance(given, list) and len(given) > MAX_PROMPTS and not isinstance(given[0], int):
        raise UsageError(f"prompt must have at most {MAX_PROMPTS} texts or lists of token ids, not {len(given)}")
    try:
        found = parse_prompts(given)
    except UsageError as error:  # its text offers forms of the Python API
        raise UsageError(form) from error
    if not found:
        raise UsageError("prompt is an empty list; give at least one text or token")
    return found


def _content(given: Any) -> str:
    """Return the text of a message; parts are joined by line breaks, as vLLM does."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise UsageError("messages: content must be text or a list of text parts")
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"messages: content must be text; parts of type {kind!r} are not supported")
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise UsageError(f"messages: content has the unknown field {unknown[0]!r}; leave it out")
    return "\n".join(part["text"] for part in given)


def _arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of a tool call as an object, which chat templates expect; empty text is one without any."""
    try:
        found = from_json(given.strip() or "{}", allow_inf_nan=False) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(f"messages: arguments of tool_calls must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise UsageError("messages: arguments of tool_calls must be a JSON object")
    return found


class CalledFunction(_Model):
    """Function and arguments of an earlier tool call."""

    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments)]


class ToolCall(_Model):
    """Tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # left over from a stream
    function: CalledFunction


class ChatMessage(_Model):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        if self.refusal is not None:
            raise UsageError("messages: refusal is not supported; put the text into content")
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise UsageError(f"messages: content of a message with the role {self.role} is missing; give it")
        message = self.model_dump(exclude_none=True)
        return {**message, "content": self.content or ""}


def _bounded_messages(given: Any) -> Any:
    """Check the number of messages and tool calls before each of them is parsed."""
    if isinstance(given, list):
        calls = (one.get("tool_calls") for one in given if isinstance(one, dict))
        count = len(given) + sum(len(one) for one in calls if isinstance(one, list))
        if count > MAX_MESSAGES:
            raise UsageError(f"messages must have at most {MAX_MESSAGES} messages and tool calls, not {count}")
    return given


Messages = Annotated[list[ChatMessage], Field(min_length=1), BeforeValidator(_bounded_messages)]


class Function(_Model):
    """Function that a model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False  # a grammar enforces the schema if the answer must be a call, and only then


class Tool(_Model):
    """Tool that a model may call."""

    type: Literal["function"]
    function: Function


def _bounded_tools(given: Any) -> Any:
    if isinstance(given, list) and len(given) > MAX_TOOLS:
        raise UsageError(f"tools must have at most {MAX_TOOLS} functions, not {len(given)}")
    return given


Tools = Annotated[list[Tool], BeforeValidator(_bounded_tools)]


class StreamOptions(_Model):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in each chunk, as in vLLM
    include_obfuscation: Literal[False] = False  # OpenAI's padding of chunks

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise UsageError("stream_options.continuous_usage_stats needs include_usage; set it to true")
        return self


class JsonSchema(_Model):
    """Schema of answers; a grammar enforces it, also if it is not strict."""

    name: str
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(_Model):
    """Format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "must be left out" if self.json_schema is not None else "is missing; give it"
            raise UsageError(f"response_format.json_schema {problem} with the type {self.type!r}")
        return self

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the constraint; None for text."""
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.definition)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class Constraint(NamedTuple):
    """A constraint on the output, and the field of the request that asks for it."""

    params: StructuredOutputsParams
    field: str


def _structured_outputs(given: Any) -> StructuredOutputsParams:
    if not isinstance(given, dict):
        raise UsageError("structured_outputs must be an object")
    try:
        return StructuredOutputsParams(**{name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith("structured_outputs") else f"structured_outputs: {text}") from error


Sampling = Any  # checked by SamplingParams


class GenerationRequest(_Model):
    """Fields that both endpoints have."""

    model: str | None = None  # None: the served one
    max_tokens: Sampling = None
    min_tokens: Sampling = None
    temperature: Sampling = None
    top_p: Sampling = None
    top_k: Sampling = None
    min_p: Sampling = None
    n: Sampling = None
    stop: Sampling = None
    stop_token_ids: Sampling = None
    seed: Sampling = None
    presence_penalty: Sampling = None
    frequency_penalty: Sampling = None
    repetition_penalty: Sampling = None
    logit_bias: Sampling = None
    ignore_eos: Sampling = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputsParams | None, PlainValidator(_structured_outputs)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # names the client's user; no effect, as in OpenAI's API
    safety_identifier: str | None = None  # newer name of user
    prompt_cache_key: str | None = None  # requests with the same key go to the same replica

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise UsageError("stream_options is for streams; set stream to true or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the token counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def constraint(self) -> Constraint | None:
        """Constraint on the output; None if there is none."""
        formatted = None if self.response_format is None else self.response_format.structured_outputs()
        if self.structured_outputs is None:
            return None if formatted is None else Constraint(formatted, "response_format")
        if formatted is not None:
            raise UsageError("response_format and structured_outputs both constrain the output; give one of them")
        return Constraint(self.structured_outputs, f"structured_outputs.{self.structured_outputs.kind}")

    def sampling_params(self, defaults: SamplingParams, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the parameters of the request: `defaults` for fields that it lacks, and this `max_tokens`."""
        given = {
            field.name: value
            for field in fields(SamplingParams)
            if field.name != "logprobs" and (value := getattr(self, field.name)) is not None
        }
        _check_bounds(given)
        if (constraint := self.constraint) is not None:
            if self.ignore_eos:
                raise UsageError(
                    f"{constraint.field} needs ignore_eos false: only the end-of-text token may follow a complete "
                    "output"
                )
            given["structured_outputs"] = constraint.params
        given = {"max_tokens": max_tokens, **given, "logprobs": logprobs}
        limit = given["max_tokens"]
        if isinstance(limit, int):  # the model's minimum must not contradict the request's maximum
            defaults = replace(defaults, min_tokens=min(defaults.min_tokens, max(limit, 0)))
        return replace(defaults, **given)


def _check_bounds(given: Mapping[str, Any]) -> None:
    """Raise UsageError for values that are valid but would keep the server busy for one client."""
    n, stop = given.get("n"), given.get("stop")
    if isinstance(n, int) and n > MAX_COMPLETIONS:
        raise UsageError(f"n must be at most {MAX_COMPLETIONS}, not {n}")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise UsageError(f"stop must have at most {MAX_STOP_STRINGS} texts, not {len(stop)}")
    longest = max(
        (len(text) for text in (stop if isinstance(stop, list) else [stop]) if isinstance(text, str)), default=0
    )
    if longest > MAX_STOP_LENGTH:
        raise UsageError(f"stop must have texts of at most {MAX_STOP_LENGTH} characters, not {longest}")


def _check_logprobs(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_LOGPROBS:
        raise UsageError(f"{name} must be a whole number from 0 to {MAX_LOGPROBS}, not {value!r}")
    return value


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[ParsedPrompt], PlainValidator(_prompts)]
    logprobs: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens per position; None: no log-probabilities."""
        return None if self.logprobs is None else _check_logprobs("logprobs", self.logprobs)


class NamedFunction(_Model):
    """Name of a function."""

    name: str


class NamedToolChoice(_Model):
    """The function that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(given: Any) -> str | NamedToolChoice:
    if isinstance(given, dict):
        try:
            return NamedToolChoice.model_validate(given)
        except ValidationError as error:
            form = '{"type": "function", "function": {"name": NAME}}'
            raise UsageError(f"tool_choice must have the form {form} to name a function") from error
    if given not in ("none", "auto", "required"):
        raise UsageError("tool_choice must be 'none', 'auto', 'required' or an object that names a function")
    return str(given)


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Sampling = None  # newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Any = None
    tools: Tools | None = None
    tool_choice: Annotated[str | NamedToolChoice | None, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None  # for chat templates that read it
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the chat template, as in vLLM

    @model_validator(mode="after")
    def _check(self) -> Self:
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise UsageError("max_tokens and max_completion_tokens mean the same; give one of them")
        if self.top_logprobs not in (None, 0) and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs; set logprobs to true or leave top_logprobs out")
        if self.tool_choice is not None and not self.tools:
            raise UsageError("tool_choice needs tools; give tools or leave it out")
        return self

    @property
    def requires_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def constraint(self) -> Constraint | None:
        """Constraint on the output; None if there is none."""
        found = super().constraint
        if found is not None and self.active_tools:
            raise UsageError(
                f"{found.field} leaves no place for tool calls; leave tools out, or set tool_choice to 'none'"
            )
        if self.requires_call:
            return Constraint(StructuredOutputsParams(grammar=self._call_grammar()), "tools")
        return found

    def _call_grammar(self) -> str:
        """Return a grammar of the tool calls that `tool_choice` requires."""
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, NamedToolChoice):
            tools = [tool for tool in tools if tool.function.name == choice.function.name][:1]
            if not tools:
                raise UsageError(f"tool_choice names the function {choice.function.name!r}, which tools does not have")
        several = self.parallel_tool_calls and choice == "required"
        return hermes_grammar([(tool.function.name, tool.function.parameters) for tool in tools], several=several)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens per position; None: no log-probabilities."""
        return _check_logprobs("top_logprobs", self.top_logprobs or 0) if self.logprobs else None

    @property
    def active_tools(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(_Model):
    """Body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # with `messages`
    add_special_tokens: bool | None = None  # None: with `prompt` only
    add_generation_prompt: bool = True  # with `messages`
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise UsageError("prompt or messages must be given, and not both")
        if self.tools and self.messages is None:
            raise UsageError("tools go with messages; leave tools out")
        return self


class DetokenizeRequest(_Model):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=_Model)


def parse_request(kind: type[R], body: bytes) -> R:
    """Return a request from its JSON; raise ApiError if it is not one."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {name: value for name, value in given.items() if value is not None}
    known = kind.model_fields
    for name in [name for name in given if name not in known]:
        if name not in _UNSUPPORTED or not issubclass(kind, GenerationRequest):
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise ApiError(400, f"unknown field {name!r}; {hint}", param=name[:100], code="unknown_parameter")
        neutral, advice = _UNSUPPORTED[name]
        if given.pop(name) not in neutral:
            raise ApiError(400, f"{name} is not supported; {advice}", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(given)
    except UsageError as error:
        raise bad_request(error) from error
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0]) from error


def _invalid(first: ErrorDetails) -> ApiError:
    """Return pydantic's first finding as an error."""
    place, kind = first["loc"], first["type"]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    path = "".join(steps).removeprefix(".")
    param = str(place[0]) if place else None
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {path}; leave it out", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{path} is missing; give it", param=param, code="missing_required_parameter")
    if kind == "too_short":
        return ApiError(400, f"{path} is empty; give at least one", param=param)
    text = str(first["msg"]).replace("Input should be", "must be", 1)
    return ApiError(400, f"{path} {text}, not {_shown(first['input'])}", param=param)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
