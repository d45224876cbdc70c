"""The API's documentation: Swagger UI, served from the service itself."""

import base64
import gzip
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_http.access import access
from solrl_http.routes.common import accepts_gzip

router = APIRouter(prefix="/docs", include_in_schema=False)

_MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_SCRIPT = """
window.ui = SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null, layout: "BaseLayout",
});
"""
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>__TITLE__</title>
<link rel="icon" href="docs/static/favicon.png">
<link rel="stylesheet" href="docs/static/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/static/swagger-ui-bundle.js"></script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
_POLICY = [
    "default-src 'none'",
    f"script-src 'self' 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'",
    "style-src 'self' 'unsafe-inline'",  # Swagger UI writes style attributes
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
]
_HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


@router.get("")
@access("open")
def page(request: Request) -> Response:
    """The page, which reads `/openapi.json`."""
    body = _PAGE.replace("__TITLE__", request.app.title)
    return Response(body, media_type="text/html", headers=_HEADERS | {"Content-Security-Policy": "; ".join(_POLICY)})


@router.get("/static/{name}")
@access("open")
def static(request: Request, name: str) -> Response:
    """A file of Swagger UI, as `fastapi-offline` packages it; a text is compressed for a client that accepts it."""
    if name not in _MEDIA_TYPES:
        raise ProblemError(ProblemKind.NOT_FOUND, f"got file {name[:100]!r}", expected=", ".join(_MEDIA_TYPES))
    headers = _HEADERS | {"Cache-Control": "max-age=86400", "Vary": "Accept-Encoding"}
    packed = _MEDIA_TYPES[name].startswith("text/") and accepts_gzip(request)
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(_content(name, packed), media_type=_MEDIA_TYPES[name], headers=headers)


@cache
def _content(name: str, packed: bool) -> bytes:
    content = (files("fastapi_offline") / "static" / name).read_bytes()
    return gzip.compress(content, mtime=0) if packed else content
