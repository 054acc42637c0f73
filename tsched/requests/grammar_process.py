"""The program of a process that reads grammars for one that must not hang: it is killed where it takes too long.

It needs nothing but llguidance. Argument: the limits of llguidance's LLParserLimits, as JSON. Each line of its input is
[format, text], each of its output [grammar, error]; the first line, "ready", says that it has begun.
"""

import json
import resource
import sys

_MEMORY_BYTES = 2 * 2**30


def main() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

    limits, tokens = LLParserLimits(**json.loads(sys.argv[1])), LLTokenizer("byte")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    print("ready", flush=True)
    for line in sys.stdin:
        grammar = error = ""
        try:
            grammar = grammar_from(*json.loads(line))
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # where nothing may begin an output, it finds out only now
            error = matcher.get_error()
        except (ValueError, RecursionError, MemoryError) as fault:
            error = f"{type(fault).__name__}: {fault}"
        print(json.dumps([grammar, error]), flush=True)


if __name__ == "__main__":
    main()
