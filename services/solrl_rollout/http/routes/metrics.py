"""What Prometheus reads."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from solrl_rollout.http.routes.common import PROBLEMS
from solrl_rollout.status.metrics import Telemetry

router = APIRouter(tags=["metrics"], responses=PROBLEMS)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' format"}},
)
def metrics(request: Request) -> Response:
    """Queue, throughput, adapters, requests and memory, for Prometheus; needs the scope `admin`."""
    telemetry: Telemetry = request.app.state.telemetry
    return Response(telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)
