"""One rank that does nothing but beat: `python -m tests.control.beat RANK SETTINGS_JSON KEY_FILE`.

Prints `up` when every peer has been heard (rank 0: all others; others: rank 0), and `failed: ...` on a PairError,
then ends. A line on its input: `fault WORDS` or `stop WORDS`."""

import asyncio
import sys
from pathlib import Path

import msgspec
import uvloop

from tided.control.heartbeat import Heartbeats
from tided.control.keys import load_keys
from tided.settings import Settings


async def beat(rank, settings, keys):
    over = asyncio.get_running_loop().create_future()
    beats = Heartbeats(settings, rank, keys, "session", lambda: 7 + rank, over.set_result, lambda: None)
    beats.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    command = asyncio.create_task(reader.readline())
    while not all(beats.peer_seq.values()) and not over.done():
        await asyncio.sleep(0.01)
    print("up", beats.peer_seq, flush=True)
    await asyncio.wait([over, command], return_when=asyncio.FIRST_COMPLETED, timeout=60)
    if over.done():
        print("failed:", over.result(), flush=True)
    elif command.done():
        verb, _, words = command.result().decode().strip().partition(" ")
        await (beats.fault(words) if verb == "fault" else beats.stop(words))
    await beats.close()


uvloop.run(
    beat(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Settings), load_keys(Path(sys.argv[3]), create=False))
)
