"""Routes that load and unload LoRA adapters, as vLLM has them.

Not here: requests that name an adapter (`openai_routes`), reading one (`ca_jax.models.adapters`).
Source: vLLM, `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`.
"""

from __future__ import annotations

import fastapi
from fastapi.responses import JSONResponse

from ca_jax.server.bodies import LoadAdapter, UnloadAdapter
from ca_jax.server.errors import OBJECT, ApiError, responses
from ca_jax.server.openai_routes import described_model
from ca_jax.server.service import Service
from ca_jax.server.state import KeyedRoute, TheService, TheTenant
from ca_jax.server.tenants import Tenant

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["adapters"], route_class=KeyedRoute)
_ANSWERS = responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=OBJECT)


@ROUTES.post("/load_lora_adapter", responses=_ANSWERS)
async def load_adapter(body: LoadAdapter, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Loads an adapter from a directory of the server. Requests name it as `MODEL:ADAPTER` from then on."""
    _check_allowed(service, tenant)
    await service.load_adapter(tenant, body.lora_name, body.lora_path)
    return JSONResponse(described_model(service, body.lora_name))


@ROUTES.post("/unload_lora_adapter", responses=_ANSWERS)
async def unload_adapter(body: UnloadAdapter, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Unloads an adapter that no answer and no open conversation uses."""
    _check_allowed(service, tenant)
    await service.unload_adapter(tenant, body.lora_name)
    return JSONResponse({"id": service.model_of(body.lora_name), "object": "model", "deleted": True})


def _check_allowed(service: Service, tenant: Tenant) -> None:
    """Raises ApiError where no adapters are loaded, or not by a key of this tenant."""
    if not service.max_adapters:
        raise ApiError(404, "adapters are loaded by a server with --max_adapters above 0", code="adapters_off")
    if not tenant.adapters:
        message = "adapters must be loaded and unloaded with a key whose tenant may (adapters = true)"
        raise ApiError(403, message, code="not_allowed")
