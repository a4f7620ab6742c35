"""The application: its routes, its middleware, and its lifespan. The checkpoint is loaded while `/health` answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse

from model import __version__
from model.network.ranks import Ranks
from service.http.cors import Cors
from service.http.documentation import add_documentation, add_response
from service.http.errors import InternalErrors, install_error_handlers
from service.http.gate import PAGE_PATH, Gate
from service.http.openapi import API_KEY, error_answers
from service.http.page_files import PageFiles
from service.http.request_reports import RequestReports
from service.http.root_path import RootPath
from service.loading import close, load
from service.memory import trim_forever
from service.routes import (
    attribute,
    compare,
    forward,
    generate,
    health,
    infill,
    logits,
    patterns,
    score,
    status,
    tokenize,
    vectors,
    weights,
)
from service.routes import model as model_route
from service.routes.anthropic import messages
from service.routes.openai import chat, completions, embeddings, responses, stored_responses
from service.routes.openai import models as openai_models
from service.settings import Settings
from service.span_export import close_tracer, open_tracer
from service.state import State

DESCRIPTION = """A see-through inference server: read any activation of the forward pass over HTTP.

`POST /forward` returns the stages of a forward pass, `POST /logits` its logits. `POST /generate` continues a prompt, as
one answer or as a stream. You can run every example on this page without changes."""


def create_app(settings: Settings, on_failure: Callable[[], None] | None = None, ranks: Ranks | None = None) -> FastAPI:
    """An application that loads its checkpoint at the start. `on_failure` is called if loading or the engine fails.

    With `ranks`, whose rank 0 this process is, the other ranks compute a share of the network. Raises
    `SpansUnavailable` if the settings ask for traces that cannot be sent from here.
    """
    state = State(settings, ranks)
    tracer = None if settings.otlp_endpoint is None else open_tracer(settings.otlp_endpoint, state.metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        background = (
            load(state, on_failure),
            trim_forever(partial(state.worker.executors.run_uncounted, "bodies")),
            state.token_rates.sample_forever(),
        )
        tasks = [asyncio.create_task(coroutine) for coroutine in background]
        yield
        for task in tasks:
            task.cancel()
        if tracer is not None:
            await close_tracer(tracer, state.worker)
        close(state)

    app = FastAPI(
        title="Forwardscope",
        version=__version__,
        description=DESCRIPTION,
        servers=[{"url": ".", "description": "this service"}],  # relative to openapi.json, so it works below any path
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # these are added below
        docs_url=None,
        redoc_url=None,
    )
    add_documentation(app)
    add_routes(app, state)
    add_response(app, "/openapi.json", JSONResponse(app.openapi()))  # encoded once, as that takes 20 ms
    if settings.page:
        files = PageFiles()
        app.add_route("/", files.index, include_in_schema=False)
        app.mount(PAGE_PATH, files)
    # A request passes those that are added last first: root path, reports, CORS, errors, gate, and a route.
    app.add_middleware(Gate, routes=app.routes, buffers=state.buffers, settings=settings)
    app.add_middleware(InternalErrors)
    if settings.cors_origin:
        app.add_middleware(Cors, origins=settings.cors_origin)
    paths = {**app.openapi()["paths"], **({"/": {"get"}, PAGE_PATH: {"get"}} if settings.page else {})}
    app.add_middleware(RequestReports, paths=paths, metrics=state.metrics, tracer=tracer)
    if settings.root_path is not None:
        app.add_middleware(RootPath, root=settings.root_path)
    return app


def add_routes(app: FastAPI, state: State) -> None:
    """Add the routes to an application, with the errors that they raise."""
    app.state.forwardscope = state
    install_error_handlers(app)
    # For the documentation. The gate checks the key.
    protected = [Depends(API_KEY)] if state.settings.needs_api_key else []
    for route in (
        forward,
        logits,
        patterns,
        generate,
        infill,
        score,
        attribute,
        compare,
        tokenize,
        completions,
        chat,
        embeddings,
        responses,
        messages,
    ):
        app.include_router(route.router, responses=error_answers(), dependencies=protected)
    for route in (model_route, vectors, weights, status, openai_models, stored_responses):
        app.include_router(route.router, responses=error_answers(401), dependencies=protected)
    app.include_router(health.router)
