"""The FastAPI application: its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from spmoe import __version__
from spmoe.engine.async_llm import AsyncLLM
from spmoe.errors import PromptError
from spmoe.serve.chat import ChatCompletion
from spmoe.serve.completions import Completion
from spmoe.serve.config import ServeConfig
from spmoe.serve.dashboard import Dashboard, dashboard_page
from spmoe.serve.http import (
    LARGE_BODY,
    PROMETHEUS_TEXT,
    ApiError,
    add_access,
    error_response,
    json_response,
    read_body,
    unless_gone,
)
from spmoe.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from spmoe.serve.responses import EventStream
from spmoe.serve.service import Service, Submission


def make_app(llm: AsyncLLM, config: ServeConfig) -> FastAPI:
    """Return the application; its `state` has the `service` and the `dashboard` that the endpoints use."""
    service = Service(llm, config)
    app = FastAPI(title="spmoe", version=__version__, openapi_url=None)  # no pages that load scripts from elsewhere
    app.state.service = service
    _add_generation_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_information_routes(app, service)
    _add_dashboard_routes(app, service)
    add_access(app, config, service.metrics.count_response)
    return app


# ---- routes


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    async def generate(request: Request, make: Callable[[bytes], Completion | ChatCompletion]) -> Response:
        body = await read_body(request, service.config.max_body_size, service.draining)

        async def work() -> Response:
            if len(body) > LARGE_BODY:
                job = await service.in_thread(lambda: make(body))
            else:
                with service.refusals():
                    job = make(body)
            submission = await service.submit(job)
            if job.streams:
                return await _start_stream(job, submission)
            try:
                return json_response(await job.respond(submission), headers={"X-Request-Id": job.id})
            finally:
                await submission.close()

        return await unless_gone(request.receive, work())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, lambda body: Completion(service, parse_request(CompletionRequest, body)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, lambda body: ChatCompletion(service, parse_request(ChatCompletionRequest, body)))


async def _start_stream(job: Completion | ChatCompletion, submission: Submission) -> EventStream:
    """Wait for the first event, so that an error before it has a status of its own."""
    events = job.stream(submission)
    try:
        return EventStream(await anext(events), events, submission)
    except BaseException:
        await events.aclose()
        await submission.close()
        raise


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    def tokenize_body(body: bytes) -> dict[str, Any]:
        request = parse_request(TokenizeRequest, body)
        service.require_model(request.model)
        special = request.add_special_tokens
        if request.messages is not None:
            prompt = service.render_chat(
                request.messages,
                request.tools or [],
                add_special_tokens=special or False,
                add_generation_prompt=request.add_generation_prompt,
            )
            ids = prompt.token_ids or []
        else:
            ids = service.tokenize(request.prompt or "", "prompt", add_special_tokens=special is not False)
        tokens = service.llm.llm.get_tokenizer().convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": tokens}

    def detokenize_body(body: bytes) -> dict[str, Any]:
        request = parse_request(DetokenizeRequest, body)
        service.require_model(request.model)
        vocabulary = service.llm.llm.engine.target.vocab_size
        if not all(0 <= token < vocabulary for token in request.tokens):
            raise PromptError(f"tokens has ids outside the model's vocabulary of {vocabulary}; remove them")
        return {"prompt": service.llm.llm.get_tokenizer().decode(request.tokens)}

    async def answer(request: Request, function: Callable[[bytes], dict[str, Any]]) -> Response:
        body = await read_body(request, service.config.max_body_size, service.draining)
        return json_response(await service.in_thread(lambda: function(body)))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(request, tokenize_body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(request, detokenize_body)


def _add_information_routes(app: FastAPI, service: Service) -> None:
    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "spmoe",
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [model_card(name) for name in service.config.served_model_names]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(model_card(name))

    @app.get("/health")
    async def health() -> Response:
        failure = service.llm.failure
        if failure is None and service.draining.is_set():
            failure = "the server is shutting down"
        if failure is not None:
            return error_response(ApiError(503, failure))
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=PROMETHEUS_TEXT)


def _add_dashboard_routes(app: FastAPI, service: Service) -> None:
    page, headers = dashboard_page()
    dashboard = app.state.dashboard = Dashboard(service)

    @app.get("/dashboard")
    async def show_dashboard() -> Response:
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/dashboard/data")
    async def dashboard_data() -> Response:
        return json_response(dashboard.data(), headers={"Cache-Control": "no-store"})
