"""The status page: static, without secrets, and without external resources."""

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from solrl_http.access import access
from solrl_http.routes.common import compressed, document_headers, source_hash
from solrl_proto.text_files import read_text

router = APIRouter(include_in_schema=False)


@router.get("/")
@access("open")  # it contains no data
def page(request: Request) -> Response:
    """The page. It fetches its data from `/v1/status` with the visitor's token."""
    body, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return compressed(request, body, "text/html", headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page in one file, and headers that allow a browser to run only its scripts."""
    folder = files("solrl_rollout.http") / "page"
    style = read_text(folder / "uplot/uPlot.min.css") + read_text(folder / "page.css")
    names = ("charts.js", "uplot/uPlot.iife.min.js", "views.js", "run.js", "compare.js", "page.js")
    licence = f"/* uPlot\n{read_text(folder / 'uplot/LICENSE')}*/"
    script = "\n".join([*(read_text(folder / name) for name in names), licence])
    body = read_text(folder / "page.html").replace("/*style*/", style).replace("/*script*/", script).encode()
    trusted = ("require-trusted-types-for 'script'", "trusted-types 'none'")
    headers = document_headers(source_hash(script), source_hash(style), "data:", *trusted)
    tag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
    return body, headers | {"ETag": tag, "Vary": "Accept-Encoding"}
