"""What a grammar costs a step: decode steps of requests with a JSON schema beside those of the same without.

    python -m tests.tsched.structured_cost 32

Both are run in turns in one process, with so many rows, and compared by the medians of their steps' time and by the
process's CPU time, which other processes on the machine do not lengthen.
"""

from __future__ import annotations

import statistics
import sys
import time

from tsched import LLM, SamplingParams, StructuredOutputsParams

_ROUNDS, _STEPS = 9, 40
_RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
_FORM = StructuredOutputsParams(json={"type": "array", "items": _RECORD, "minItems": 1000})


def time_steps(
    llm: LLM, num_rows: int, form: StructuredOutputsParams | None, temperature: float
) -> tuple[list[float], float]:
    """(seconds of each of _STEPS steps in which all rows decode, the process's CPU seconds of one of them)."""
    engine = llm._engine
    for row in range(num_rows):
        params = SamplingParams(
            temperature=temperature, seed=row, max_tokens=_STEPS + 8, ignore_eos=True, structured_outputs=form
        )
        llm._start(llm._prepare(row, "def main(argv):\n", params, 0.0))
    while engine.scheduler.num_running < num_rows or engine.scheduler.num_waiting:
        engine.step()
    engine.step()
    seconds, cpu = [], time.process_time()
    for _ in range(_STEPS):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu) / _STEPS
    while engine.has_unfinished:
        engine.step()
    return seconds, cpu


def main() -> None:
    num_rows = int(sys.argv[1])
    llm = LLM("tiny", max_num_seqs=num_rows, prefix_cache="none")
    for temperature in (0.0, 1.0):
        steps: dict[str, list[float]] = {"without": [], "with": []}
        cpus: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(_ROUNDS):
            for name, form in (("without", None), ("with", _FORM)):
                seconds, cpu = time_steps(llm, num_rows, form, temperature)
                steps[name] += seconds
                cpus[name].append(cpu)
        for what, times in (("wall", steps), ("CPU", cpus)):
            without, formed = (1e3 * statistics.median(times[name]) for name in ("without", "with"))
            print(
                f"temperature {temperature:g}, {num_rows} rows, {what}: {without:.3f} ms a step without a grammar, "
                f"{formed:.3f} with: {formed / without:.2f}x"
            )


if __name__ == "__main__":
    main()
