"""Drawn requests at every route of a server: no 5xx, nothing that its own OpenAPI document denies, no long refusal.

    python -m tests.tsched.serving.fuzz_routes --examples 1000

Half of them keep to the document and half break it. The engine is scripted: it is the wire that is asked.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import randoms
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tsched.serving.auth import ADMIN_PREFIX, Keys, Tenant

USER, ADMIN = "user-0123456789ab", "admin-0123456789"
KEYS = Keys({USER: Tenant("user"), ADMIN: Tenant("root", is_admin=True)})
"""Of the server: its admin's routes answer."""

MODEL = "random"
NEEDED = frozenset({"model", "prompt", "messages"})
LONGEST_REFUSAL = 4096
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def fuzz(base: str, num_examples: int) -> dict[str, Counter[int]]:
    """Draws `num_examples` requests for each route of the server at `base`, half of them for its document's sake.

    A route without a parameter has one request only. Of half of the sound bodies most optional fields are left out, for
    most values that a document allows the model refuses, and half of the sound ones ask for a stream.

    Returns:
        Route -> how many answers had each status. AssertionError or schemathesis' failure at the first wrong one.
    """
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json", headers=bearer(USER))
    found: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        statuses = found.setdefault(f"{operation.method.upper()} {operation.path}", Counter())
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method != "post":
                continue  # nothing of it can be wrong
            _ask(operation, mode, max(1, num_examples // 2), statuses)
    return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _ask(operation: Any, mode: GenerationMode, num_examples: int, statuses: Counter[int]) -> None:
    headers = bearer(ADMIN if operation.path.startswith(ADMIN_PREFIX) else USER)
    streams = "text/event-stream" in operation.definition.raw["responses"]["200"]["content"]

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), drawn=randoms(use_true_random=False))
    def ask(case: Any, drawn: random.Random) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # else nearly all of them are 404
        if mode is GenerationMode.POSITIVE and streams:
            if drawn.random() < 0.5:
                case.body = {name: one for name, one in case.body.items() if name in NEEDED or drawn.random() < 0.1}
            if drawn.random() < 0.5:
                case.body["stream"] = True
        if "model" in case.path_parameters and drawn.random() < 0.5:
            case.path_parameters["model"] = MODEL
        response = case.call(timeout=60, headers=headers)
        statuses[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert len(response.content) <= LONGEST_REFUSAL
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        case.validate_response(response, checks=CHECKS)

    ask()


def main() -> int:
    """Fuzzes a server of this process and prints what came back."""
    import tmodel
    from tests.tsched.serving.conftest import RunningServer
    from tests.tsched.serving.scripted_client import ScriptedClient
    from tsched.serving.app import create_app

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="of each route")
    options = parser.parse_args()
    server = RunningServer(create_app(ScriptedClient(tmodel.preset_path("tiny")), keys=KEYS)).wait_until_ready()
    for route, statuses in fuzz(server.base, options.examples).items():
        print(f"{route:32} {dict(sorted(statuses.items()))}")
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
