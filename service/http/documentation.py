"""The pages /docs and /redoc: the schema of the service, shown by Swagger UI and by ReDoc.

Their scripts and styles come from the package fastapi-offline, so the pages load nothing from other servers, and a
Content-Security-Policy keeps them from it.
"""

import base64
import hashlib
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse

from service.http.page_files import HEADERS, PageFiles

FILES = Path(fastapi_offline.__file__).parent / "static"
DOCUMENTATION_PATHS = frozenset({"/docs", "/redoc"})
DOCUMENTATION_FILES = "/static-offline-docs"
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; worker-src blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src 'self'"
)


def add_documentation(app: FastAPI) -> None:
    """Add the pages and their files to an application, which has no such pages of its own."""

    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        return page(
            get_swagger_ui_html(
                openapi_url=f"{root}{app.openapi_url}",
                title=f"{app.title} - Swagger UI",
                swagger_js_url=f"{root}{DOCUMENTATION_FILES}/swagger-ui-bundle.js",
                swagger_css_url=f"{root}{DOCUMENTATION_FILES}/swagger-ui.css",
                swagger_favicon_url=f"{root}{DOCUMENTATION_FILES}/favicon.png",
            )
        )

    async def redoc(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        return page(
            get_redoc_html(
                openapi_url=f"{root}{app.openapi_url}",
                title=f"{app.title} - ReDoc",
                redoc_js_url=f"{root}{DOCUMENTATION_FILES}/redoc.standalone.js",
                redoc_favicon_url=f"{root}{DOCUMENTATION_FILES}/favicon.png",
                with_google_fonts=False,
            )
        )

    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_api_route("/redoc", redoc, include_in_schema=False)
    app.mount(DOCUMENTATION_FILES, PageFiles(FILES))


def page(response: HTMLResponse) -> HTMLResponse:
    """The page with the headers of the web page, and a policy that allows its own inline scripts by their hashes."""
    scripts = [part.partition("</script>")[0] for part in bytes(response.body).decode().split("<script>")[1:]]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = " ".join([POLICY, *(f"'sha256-{each}'" for each in hashes)])
    response.headers.update(HEADERS | {"Content-Security-Policy": policy})
    return response
