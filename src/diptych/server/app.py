"""The application: routes, errors in one shape, and what starts and stops with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from diptych import __version__
from diptych.server.api import content, events, system, videos
from diptych.server.gate import Gate
from diptych.server.problems import Problem
from diptych.server.service import Service

_CODES = {404: "not_found", 405: "method_not_allowed"}


def build(service: Service) -> FastAPI:
    """The ASGI application around `service`, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Diptych",
        version=__version__,
        summary="Clips with synchronised sound, behind OpenAI's video API.",
        lifespan=lifespan,
        root_path=service.settings.root_path,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere; ours is in the studio folder
        redoc_url=None,
    )
    app.state.service = service
    for router in (events.router, content.router, videos.router, system.router):
        app.include_router(router)
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    return app


async def _problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    headers = dict(error.headers)
    return JSONResponse(error.body(), error.status, headers=headers)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "invalid_value")
    problem = Problem(error.status_code, code, f"{error.detail}.", headers=dict(error.headers or {}))
    return await _problem(_, problem)


async def _validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return await _problem(_, Problem(400, "invalid_value", f"{first['msg']}.", str(first["loc"][-1])))


async def _hung_up(_: Request, error: Exception) -> JSONResponse:
    return await _problem(_, Problem(400, "invalid_value", "The request ended before its body was complete."))
