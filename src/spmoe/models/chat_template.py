"""Chat templates: find out from a model's small files, before any weights are read, whether it has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmoe.errors import CheckpointError, UsageError, reason
from spmoe.files import model_directory

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
    """Raise UsageError if a template is not valid Jinja, as transformers compiles it."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "hello"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{origin} is not a chat template (line {error.lineno}: {reason(error)}); correct it"
        ) from error
    except Exception:  # only the tokenizer knows all variables; what the template rejects is reported per message
        return


def _has_template(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == _TEMPLATE:
            return bool(text)
        declared: Any = json.loads(text)
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
