"""The HTTP routes, one module per subject, and the dependency that they share."""

from typing import Annotated

from fastapi import Depends
from solrl_http.routes.common import running_service

from solrl_rollout.service import Service

ServiceDep = Annotated[Service, Depends(running_service)]
