"""`spmoe serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe.cli.interrupts import nothing_to_clean_up
from spmoe.cli.options import load, read_text_file, stderr, takes_shared_options
from spmoe.cli.output import is_verbose, note
from spmoe.config import EngineConfig
from spmoe.errors import UsageError
from spmoe.models.chat_template import require_template_syntax
from spmoe.serve.address import bind, is_loopback, url_of
from spmoe.serve.config import DEFAULT_MODEL_NAME, ServeConfig, parse_body_size, require_extra

if TYPE_CHECKING:
    from spmoe.engine.llm import LLM


@takes_shared_options
def serve(
    engine: dict[str, Any],
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Key that clients must send; may be given several times. Default: no key."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of the model in the API; may be given several times. Default: MODEL."),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web origin whose pages may use the server (CORS), or *; may be given several times. Default: none.",
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that run together; others wait.")] = 8,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens that are read between two steps of the sequences that run.")
    ] = 512,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Start from the KV cache of an earlier request with the same first tokens.",
        ),
    ] = True,
    max_queued_requests: Annotated[
        int, typer.Option(help="Longest queue of requests; further ones get status 429.")
    ] = 256,
    max_body_size: Annotated[str, typer.Option(help="Largest body of a request; larger ones get status 413.")] = "8MiB",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds for requests under way after SIGTERM or Ctrl-C; then they end with an error.")
    ] = 30.0,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="Format of the model's tool calls: hermes (also Qwen) or gpt-oss.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja chat template to use instead of the model's own.")
    ] = None,
    ray_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Run N replicas of the engine with Ray Serve, one per GPU; a session stays on its replica. Needs the "
            "ray extra.",
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's API: /v1/completions, /v1/chat/completions and /v1/models.

    SIGTERM or Ctrl-C stops accepting, lets requests under way finish, and ends with exit code 0. Needs the serve
    extra: pip install 'spmoe[serve]'.
    """
    if ray_replicas is not None:
        require_extra("ray")  # names the extra that includes the server
        if ray_replicas < 1:
            raise UsageError(f"ray_replicas must be at least 1, not {ray_replicas}")
    require_extra("serve")
    engine |= {
        "max_num_seqs": max_num_seqs,
        "prefill_chunk": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
    }
    EngineConfig.make(**{**engine, "model": engine["model"] or ""})  # checked before anything is loaded
    config = ServeConfig(
        served_model_names=tuple(served_model_name or [engine["model"] or DEFAULT_MODEL_NAME]),
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allowed_origins or ()),
        max_queued_requests=max_queued_requests,
        max_body_size=parse_body_size(max_body_size),
        shutdown_timeout=shutdown_timeout,
        tool_call_parser=tool_call_parser,
    )
    template = None
    if chat_template is not None:
        template = read_text_file(chat_template)
        require_template_syntax(template, str(chat_template))
    bound = bind(config)
    try:
        if not config.api_keys and not is_loopback(bound):
            note(f"warning: other machines can reach {host}, and everyone may use the model; set --api-key")
        if ray_replicas is not None:
            _run_replicas(engine, config, template, bound, ray_replicas)
            return
        with load(engine) as llm:
            if template is not None and llm.engine.parts.tokenizer is not None:
                llm.engine.parts.tokenizer.chat_template = template
            _run(llm, config, bound)
    finally:
        bound.close()


def _run(llm: LLM, config: ServeConfig, bound: socket) -> None:
    """Serve with an engine in this process until a signal comes."""
    from spmoe.engine.async_llm import AsyncLLM
    from spmoe.serve.app import make_app

    _serve(make_app(AsyncLLM(llm=llm), config), config, bound, "")


def _run_replicas(engine: dict[str, Any], config: ServeConfig, template: str | None, bound: socket, count: int) -> None:
    """Serve with replicas in processes of Ray until a signal comes."""
    with nothing_to_clean_up():
        import spmoe.backends.devices  # noqa: F401  (torch, for the choice of the device)
        from spmoe.serve.ray import ReplicaOptions, local_replicas, make_gateway

    note(f"starting Ray with {count} replica{'s' if count > 1 else ''}")
    with local_replicas(ReplicaOptions(engine, config, template), count, verbose=is_verbose()) as replicas:
        _serve(make_gateway(replicas, config), config, bound, f" with {count} replica{'s' if count > 1 else ''}")


def _serve(app: Any, config: ServeConfig, bound: socket, extent: str) -> None:
    """Run an application of FastAPI; print a line when it accepts requests, which has `extent` after the address."""
    from spmoe.serve.server import serve as serve_app

    message = f"serving {config.served_model_names[0]} at {url_of(bound)}/v1{extent}; Ctrl-C or SIGTERM stops"
    serve_app(app, config, bound, access_log=is_verbose(), ready=lambda: stderr().print(message, soft_wrap=True))
