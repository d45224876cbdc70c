"""The page that shows how runs go: static, without secrets, and with nothing from elsewhere."""

import base64
import gzip
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)


@router.get("/")
def page(request: Request) -> Response:
    """The page. What it shows it asks `/v1/status` for, with the visitor's token."""
    body, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(gzip.compress(body), media_type="text/html", headers=headers | {"Content-Encoding": "gzip"})
    return Response(body, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page in one file, and the headers that let a browser run that and nothing else."""
    folder = files("solrl_rollout.http") / "page"
    style = (folder / "page.css").read_text("utf-8")
    script = "\n".join((folder / name).read_text("utf-8") for name in ("charts.js", "views.js", "page.js"))
    html = (folder / "page.html").read_text("utf-8").replace("/*style*/", style).replace("/*script*/", script)
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
