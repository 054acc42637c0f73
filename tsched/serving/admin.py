"""POST /admin/kernels: kernels are swapped in the live server, between two steps of its engine."""

from __future__ import annotations

from pydantic import BaseModel

from tsched.serving.engine_client import (
    EngineClient,
    EngineFailedError,
    EngineUnavailableError,
    RequestRefusedError,
)
from tsched.serving.protocol.errors import engine_failure, invalid_value, unavailable
from tsched.serving.protocol.sampling import WireModel


class SwapRequest(WireModel):
    """The ops to swap, as an experiment's section `kernels`; null asks for an op's default."""

    kernels: dict[str, str | dict[str, dict[str, int] | None] | None]


class SwapAnswer(BaseModel):
    first_step: int
    arm: dict[str, str]


EXAMPLE = {"kernels": {"paged_decode": "split_kv", "rms_norm": {"row_per_program": {"num_warps": 4}}}}


async def swap_kernels(client: EngineClient, request: SwapRequest) -> SwapAnswer:
    """Swaps kernels and says from which step on they run.

    Raises:
        ApiError: 400, a choice is unknown or cannot serve the model; 500 and 503, the engine has failed or is not
            ready. Nothing has changed then.
    """
    try:
        swap = await client.swap_kernels(request.kernels)
    except RequestRefusedError as error:
        raise invalid_value(str(error), "kernels") from None
    except EngineUnavailableError as error:
        raise unavailable(str(error), error.retry_after) from None
    except EngineFailedError as error:
        raise engine_failure(str(error)) from None
    return SwapAnswer(first_step=swap.first_step, arm=dict(swap.arm))
