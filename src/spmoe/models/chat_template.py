"""Chat templates: find out, before any weights are read, whether a model has one; render it within limits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmoe.errors import CheckpointError, PromptError, UsageError, reason
from spmoe.files import decode_json, model_directory

if TYPE_CHECKING:
    from spmoe.models.template_limits import LimitedTemplate

_TEMPLATE, _TOKENIZER = "chat_template.jinja", "tokenizer_config.json"


def require_chat_template(model: str) -> None:
    """Raise UsageError if a model has no chat template. A hub model's two small files are downloaded, nothing else.

    A hub that does not answer is left to the download of the weights, which reports it.
    """
    directory = model_directory(model)
    files = [directory / name for name in (_TEMPLATE, _TOKENIZER)] if directory is not None else _hub_files(model)
    if files is not None and not any(_has_template(path) for path in files if path.is_file()):
        raise UsageError(
            f"{model} has no chat template, so it is not a chat model; use `spmoe run`, or give a template with "
            "--chat-template FILE"
        )


def require_template_syntax(template: str, origin: str) -> None:
    """Raise UsageError if a template is not valid Jinja, or takes too long or too much memory for a short message."""
    from jinja2 import TemplateSyntaxError

    from spmoe.models.template_limits import TemplateLimitError

    try:
        _render(template, [{"role": "user", "content": "hello"}], {})
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{origin} is not a chat template (line {error.lineno}: {reason(error)}); correct it"
        ) from error
    except TemplateLimitError as error:
        raise UsageError(f"{origin} cannot be used as a chat template ({reason(error)}); correct it") from error
    except Exception:  # only the tokenizer knows all variables; what the template rejects is reported per message
        return


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], model: str, **options: Any) -> str:
    """Return a conversation as a prompt, up to where the answer begins; the same text as `apply_chat_template`.

    `options` are further variables of the template, such as `tools`. Raises PromptError if the template rejects
    the messages, takes too long, or takes too much memory.
    """
    try:
        return render_messages(tokenizer, messages, f"the chat template of {model}", **options)
    except PromptError as error:
        raise PromptError(
            f"{error}, give another template with --chat-template FILE, or use `spmoe run` or LLM.generate"
        ) from error


def render_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]], name: str, **options: Any) -> str:
    """Return the same text as `render_chat`; errors call the template by this name and do not mention commands."""
    from spmoe.models.template_limits import TemplateLimitError

    try:
        return _render(tokenizer.get_chat_template(), messages, {**tokenizer.special_tokens_map, **options})
    except (TemplateLimitError, RecursionError, MemoryError) as error:
        raise PromptError(f"{name} is refused ({reason(error)}); shorten the messages") from error
    except Exception as error:  # templates raise their own errors through jinja
        raise PromptError(f"{name} rejects these messages ({reason(error)}); change them") from error


_rendering = threading.Lock()  # compiled templates are shared


def _render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a template with the variables that transformers gives it."""
    from transformers.utils import chat_template_utils as theirs

    plain, alias = (getattr(theirs, name, None) for name in ("_plain_template_data", "_alias_reasoning_fields"))
    chat: Any = list(messages)
    for prepare in (plain, alias):  # not in every version of transformers
        chat = chat if prepare is None else prepare(chat)
    with _rendering:
        return _compiled(template).render(
            **{"tools": None, "documents": None, "add_generation_prompt": True, **variables, "messages": chat}
        )


@lru_cache(maxsize=8)
def _compiled(template: str) -> LimitedTemplate:
    """Compile a template with the filters, functions and tags of transformers' own environment."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from spmoe.models.template_limits import LimitedTemplate

    return LimitedTemplate(template, _compile_jinja_template("").environment)


def _has_template(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == _TEMPLATE:
            return bool(text)
        declared: Any = decode_json(text)
        template = declared.get("chat_template") if isinstance(declared, dict) else None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({reason(error)}); download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if isinstance(template, list):  # several, by name; transformers takes `default`
        return any(isinstance(one, dict) and one.get("name") == "default" for one in template)
    return bool(template)


def _hub_files(model: str) -> list[Path] | None:
    """Return the files of a hub model that can hold a template; None if the hub cannot be asked."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *values: Any, **options: Any) -> None:
            super().__init__(*values, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    found = []
    for name in (_TEMPLATE, _TOKENIZER):
        try:
            found.append(Path(hf_hub_download(model, name, tqdm_class=NoBar)))
        except LocalEntryNotFoundError:  # offline or no network, so that it is unknown whether the file exists
            return None
        except EntryNotFoundError:
            continue
        except Exception:  # the hub client raises anything from a socket error to its own classes
            return None
    return found
