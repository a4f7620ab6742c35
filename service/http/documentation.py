"""The schema /openapi.json of the service, and the pages /docs and /redoc: Swagger UI and ReDoc, which show it.

Their scripts and styles come from the package fastapi-offline. A Content-Security-Policy keeps the pages from loading
anything from other servers.
"""

import base64
import hashlib
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from service.http.page_files import HEADERS, PageFiles

FILES = Path(fastapi_offline.__file__).parent / "static"
DOCUMENTATION_PATHS = frozenset({"/docs", "/redoc"})
DOCUMENTATION_FILES = "/static-offline-docs"
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; worker-src blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src 'self'"
)


def add_documentation(app: FastAPI) -> None:
    """Add the pages and their files to an application, which has no such pages of its own.

    Their links are relative, so that they also work behind a proxy that puts the service below a path.
    """
    files, openapi_url = DOCUMENTATION_FILES.removeprefix("/"), "openapi.json"
    favicon = f"{files}/favicon.png"
    docs = get_swagger_ui_html(
        openapi_url=openapi_url,
        title=f"{app.title} - Swagger UI",
        swagger_js_url=f"{files}/swagger-ui-bundle.js",
        swagger_css_url=f"{files}/swagger-ui.css",
        swagger_favicon_url=favicon,
    )
    redoc = get_redoc_html(
        openapi_url=openapi_url,
        title=f"{app.title} - ReDoc",
        redoc_js_url=f"{files}/redoc.standalone.js",
        redoc_favicon_url=favicon,
        with_google_fonts=False,
    )
    add_page(app, "/docs", docs)
    add_page(app, "/redoc", redoc)
    app.mount(DOCUMENTATION_FILES, PageFiles(FILES))


def add_page(app: FastAPI, path: str, page: HTMLResponse) -> None:
    """Add a page with the headers of the web page, and a policy that allows its own inline scripts by their hashes."""
    scripts = [part.partition("</script>")[0] for part in bytes(page.body).decode().split("<script>")[1:]]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = " ".join([POLICY, *(f"'sha256-{each}'" for each in hashes)])
    add_response(app, path, HTMLResponse(page.body, headers=HEADERS | {"Content-Security-Policy": policy}))


def add_response(app: FastAPI, path: str, response: Response) -> None:
    """Add a route that always has this response."""
    app.router.routes.append(Route(path, response, methods=["GET"], include_in_schema=False))
