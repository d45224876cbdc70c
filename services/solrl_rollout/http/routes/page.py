"""The status page: static, without secrets, and without external resources."""

import base64
import gzip
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from solrl_http.access import access
from solrl_http.routes.common import accepts_gzip
from solrl_proto.text_files import read_text

router = APIRouter(include_in_schema=False)


@router.get("/")
@access("open")  # it contains no data
def page(request: Request) -> Response:
    """The page. It fetches its data from `/v1/status` with the visitor's token."""
    body, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if accepts_gzip(request):
        return Response(gzip.compress(body), media_type="text/html", headers=headers | {"Content-Encoding": "gzip"})
    return Response(body, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page in one file, and headers that allow a browser to run only its scripts."""
    folder = files("solrl_rollout.http") / "page"
    style = read_text(folder / "uplot/uPlot.min.css") + read_text(folder / "page.css")
    names = ("charts.js", "uplot/uPlot.iife.min.js", "views.js", "run.js", "compare.js", "page.js")
    licence = f"/* uPlot\n{read_text(folder / 'uplot/LICENSE')}*/"
    script = "\n".join([*(read_text(folder / name) for name in names), licence])
    html = read_text(folder / "page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    body = html.encode()
    return body, {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "ETag": f'W/"{hashlib.sha256(body).hexdigest()[:16]}"',
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
