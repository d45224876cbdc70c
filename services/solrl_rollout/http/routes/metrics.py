"""Metrics for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from solrl_rollout.http.access import access
from solrl_rollout.http.routes.common import PROBLEMS
from solrl_rollout.status.metrics import Metrics

router = APIRouter(tags=["metrics"], responses=PROBLEMS)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' format"}},
)
@access("admin")  # it shows all tenants
def metrics(request: Request) -> Response:
    """Queue, throughput, adapters, requests and memory, for Prometheus; needs the scope `admin`."""
    service_metrics: Metrics = request.app.state.metrics
    return Response(service_metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
