"""JSON schemas drawn at random, and a command that serves many at temperature 2 and reads every finished output.

    python -m tests.tsched.drawn_schemas 500

It prints how many outputs finished, and each that does not parse or validate; its exit code is 1 where there is one.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

import jsonschema_rs

from tsched import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

KEYS = ("a", "name", "küche", "x y", 'q"', "\\n", "🐍")
_PLAIN = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^[a-f]{1,4}-[0-9]+$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"const": {"k": [1, None]}},
    {"enum": ["red", 7, False, None, "🐍"]},
)


def draw_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Draws a schema with at most `depth` levels of arrays and objects."""
    kind = rng.choice(("plain", "integer", "number", *("object", "object", "array", "any") * (depth > 0)))
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "number":
        low = rng.randint(-20, 20) / 4
        return {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + 2.5}
    if kind == "object":
        keys = rng.sample(KEYS, rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {key: draw_schema(rng, depth - 1) for key in keys},
            "required": [key for key in keys if rng.random() < 0.7],
            "additionalProperties": rng.choice((False, False, {"type": "boolean"})),
        }
    if kind == "array":
        low = rng.randint(0, 2)
        limits = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
        return {"type": "array", "items": draw_schema(rng, depth - 1), **limits}
    if kind == "any":
        return {"anyOf": [draw_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return dict(rng.choice(_PLAIN))


def draw_params(seed: int, max_tokens: int) -> SamplingParams:
    """Draws a request at temperature 2 whose output has a drawn schema."""
    form = StructuredOutputsParams(json=draw_schema(random.Random(seed)))
    return SamplingParams(temperature=2.0, seed=seed, max_tokens=max_tokens, structured_outputs=form)


def find_fault(params: SamplingParams, output: RequestOutput) -> str | None:
    """Says why a finished output is not JSON of its schema; None where it is, or has not finished."""
    (one,) = output.outputs
    if output.error is not None:
        return output.error
    if one.finish_reason != "stop":
        return None
    assert params.structured_outputs is not None
    schema = str(params.structured_outputs.json)
    try:
        value = json.loads(one.text, parse_float=_read_float)
    except ValueError as error:
        return f"{one.text!r} of {schema} is no JSON: {error}"
    valid = jsonschema_rs.validator_for(json.loads(schema)).is_valid(value)
    return None if valid else f"{one.text!r} is not of {schema}"


def _read_float(text: str) -> float:
    """JSON's numbers have no bound: the largest double stands for those beyond, which would be read as infinite."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def main() -> int:
    count = int(sys.argv[1])
    llm = LLM("tiny", max_num_seqs=32)
    params = [draw_params(seed, 200) for seed in range(count)]
    outputs = llm.generate(["def main():\n"] * count, params)
    faults = [find_fault(one, output) for one, output in zip(params, outputs, strict=True)]
    print(dict(Counter(output.outputs[0].finish_reason for output in outputs)))
    print(*(fault for fault in faults if fault is not None), sep="\n")
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
