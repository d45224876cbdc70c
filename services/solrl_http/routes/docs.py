"""The API's documentation: Swagger UI, served from the service itself."""

from importlib.resources import files

from fastapi import APIRouter, Request, Response
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_http.access import access
from solrl_http.routes.common import UNCACHED, compressed, document_headers, source_hash

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


@router.get("")
@access("open")
def page(request: Request) -> Response:
    """The page, which reads `/openapi.json`."""
    # Swagger UI writes style attributes.
    headers = document_headers(f"'self' {source_hash(_SCRIPT)}", "'self' 'unsafe-inline'", "'self' data:")
    return Response(_PAGE.replace("__TITLE__", request.app.title), media_type="text/html", headers=headers)


@router.get("/static/{name}")
@access("open")
def static(request: Request, name: str) -> Response:
    """A file of Swagger UI, as `fastapi-offline` packages it; a text is compressed for a client that accepts it."""
    if name not in _MEDIA_TYPES:
        raise ProblemError(ProblemKind.NOT_FOUND, f"got file {name[:100]!r}", expected=", ".join(_MEDIA_TYPES))
    content, kind = (files("fastapi_offline") / "static" / name).read_bytes(), _MEDIA_TYPES[name]
    headers = UNCACHED | {"Cache-Control": "max-age=86400"}
    return compressed(request, content, kind, headers) if "text" in kind else Response(content, 200, headers, kind)
