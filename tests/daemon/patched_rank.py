"""The real `tided` that fails as the file `failure-N` in the state directory says.

load 0            loading never ends
hang SEQ          the step is never finished
raise SEQ WORDS   it raises
memory 0 FILE     the node has as many bytes free as FILE says"""

import errno
import sys
import time
from functools import partial
from pathlib import Path

from tided import boot, daemon, life
from tided.engine.executor import Executor

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
file = Path(arguments["--state-dir"]) / f"failure-{arguments['--rank']}"
if file.exists():
    verb, seq, *words = file.read_text().split(maxsplit=2)
    execute = Executor.execute

    def fail(self, step):
        if step.seq == int(seq):  # the first is 1
            if verb == "hang":
                time.sleep(600)
            raise OSError(errno.ENOSPC, *words, "/secret/x")
        return execute(self, step)

    Executor.execute = fail
    if verb == "memory":
        life.watch = partial(life.watch, free=lambda: int(Path(words[0]).read_text()))
    if verb == "load":
        boot.build_rank = lambda *_: time.sleep(600)

sys.exit(daemon.main())
