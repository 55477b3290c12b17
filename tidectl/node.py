"""One node's side of a connection: `python -m tidectl.node`, started by ssh. Questions come in on stdin, answers go out
on stdout, a line each; at the end of stdin it ends, and the ranks that it started go on."""

import os
import signal
import sys

import msgspec

from tidectl.node_messages import MARK, MAX_LINE_BYTES, Failed, Reply, Request
from tidectl.node_work import Work
from tidectl.state import state_dir
from tided.errors import TideError


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the connection is gone: nobody asks any more
    answers = os.dup(1)
    os.dup2(2, 1)  # what anything prints must not stand between the answers
    os.umask(0o077)
    decoder, work = msgspec.json.Decoder(Request), None
    while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
        reply: Reply
        try:
            work = work or Work(state_dir())
            reply = work(decoder.decode(line))
        except TideError as error:
            reply = Failed(error.what, error.where, error.hint, error.exit_code)
        except Exception as error:
            reply = Failed(f"{type(error).__name__}: {error}", "", "this is a mistake of ours", 1)
        _write(answers, MARK + msgspec.json.encode(reply) + b"\n")
    return 0


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    sys.exit(main())
