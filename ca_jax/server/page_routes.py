"""The page at `/`: its files, as they are packaged.

They need no key and no engine: the page asks for a key, and says that the server is starting. What it asks for by
itself comes from this server alone, and the browser is told to let it ask nobody else.

Not here: what the page asks for (`openai_routes`, `session_routes`, `live_routes`).
"""

from __future__ import annotations

import functools
import importlib.resources

import fastapi
from fastapi.responses import Response

from ca_jax.server.errors import ApiError

ROUTES = fastapi.APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@ROUTES.get("/")
async def page() -> Response:
    """Chat, and the store at work."""
    return _answer("index.html")


@ROUTES.get("/page/{name}")
async def page_file(name: str) -> Response:
    """What the page is made of."""
    return _answer(name)


def _answer(name: str) -> Response:
    files = _files()
    if name not in files:
        raise ApiError(404, f"the page has no file {name!r}")
    return Response(files[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@functools.cache
def _files() -> dict[str, bytes]:
    """Every file of the page by its name."""
    files = importlib.resources.files("ca_jax.server") / "page"
    return {file.name: file.read_bytes() for file in files.iterdir() if file.name.rpartition(".")[2] in _TYPES}
