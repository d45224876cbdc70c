"""The API's documentation: Swagger UI, served from the service itself."""

import re
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_http.access import access
from solrl_http.routes.common import UNCACHED, compressed, document_headers, source_hash

router = APIRouter(prefix="/docs", include_in_schema=False)

_MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@router.get("")
@access("open")
def page(request: Request) -> Response:
    """FastAPI's page, with files from here; it reads `/openapi.json`."""
    script, style, icon = (f"docs/static/{name}" for name in _MEDIA_TYPES)
    response = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )
    inline = " ".join(map(source_hash, _INLINE.findall(bytes(response.body).decode())))
    # Swagger UI writes style attributes.
    response.headers.update(document_headers(f"'self' {inline}", "'self' 'unsafe-inline'", "'self' data:"))
    return response


@router.get("/static/{name}")
@access("open")
def static(request: Request, name: str) -> Response:
    """A file of Swagger UI, as `fastapi-offline` packages it; a text is compressed for a client that accepts it."""
    if name not in _MEDIA_TYPES:
        raise ProblemError(ProblemKind.NOT_FOUND, f"got file {name[:100]!r}", expected=", ".join(_MEDIA_TYPES))
    content, kind = (files("fastapi_offline") / "static" / name).read_bytes(), _MEDIA_TYPES[name]
    headers = UNCACHED | {"Cache-Control": "max-age=86400"}
    return compressed(request, content, kind, headers) if "text" in kind else Response(content, 200, headers, kind)
