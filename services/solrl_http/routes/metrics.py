"""Metrics for Prometheus."""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from solrl_http.access import access
from solrl_http.request_metrics import RequestMetrics
from solrl_http.routes.common import PROBLEMS

router = APIRouter(tags=["metrics"], responses=PROBLEMS)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' format"}},
)
@access("admin")  # it shows all tenants
async def metrics(request: Request) -> Response:
    """The service's work, requests and memory, for Prometheus; needs the scope `admin`."""
    service_metrics: RequestMetrics = request.app.state.metrics
    await service_metrics.update()
    return Response(await asyncio.to_thread(service_metrics.exposition), media_type=CONTENT_TYPE_LATEST)
