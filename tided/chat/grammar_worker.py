"""A process that looks whether grammars can be compiled: `python -m tided.chat.grammar_worker`, by `tided.processes`.

    job      the grammar's text
    answer   msgpack Verdict

A few hundred bytes can keep the library busy for minutes, without a way to stop it. It needs no vocabulary to find out.
"""

import resource
import sys
import time
from typing import IO

import msgspec

from tided.processes import confine, read_part, write_parts

MEMORY_BYTES = 1 << 29
_MOST_JOB_S = 10  # of computing: the server ends what is late, unless it is gone itself
_MOST_PROBLEM_CHARACTERS = 500


class Verdict(msgspec.Struct, frozen=True):
    """`problem`: why it cannot; empty when it can. `spent_s`: of computing."""

    problem: str
    spent_s: float


def main() -> None:
    import llguidance  # here alone: the server reads this file too

    confine(MEMORY_BYTES)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while (text := read_part(jobs)) is not None:
        began_s = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began_s) + _MOST_JOB_S, resource.RLIM_INFINITY))
        problem = llguidance.LLMatcher.validate_grammar(text.decode()).partition("\n")[0]
        verdict = Verdict(problem[:_MOST_PROBLEM_CHARACTERS], time.process_time() - began_s)
        write_parts(answers, msgspec.msgpack.encode(verdict))


def read_verdict(file: IO[bytes]) -> Verdict:
    """Raises EOFError, ValueError or msgspec's errors for what is none."""
    if (answer := read_part(file)) is None:
        raise EOFError
    return msgspec.msgpack.decode(answer, type=Verdict)


if __name__ == "__main__":
    main()
