"""The real `tided` with an engine that fails at a step, told by the file `failure-N` in the state directory.

hang SEQ          the step is never finished
raise SEQ WORDS   it raises"""

import sys
import time
from pathlib import Path

from tided import daemon
from tided.engine.executor import Executor

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
file = Path(arguments["--state-dir"]) / f"failure-{arguments['--rank']}"
if file.exists():
    verb, seq, *words = file.read_text().split(maxsplit=2)
    execute = Executor.execute

    def fail(self, step):
        if step.seq == int(seq):
            if verb == "hang":
                time.sleep(600)
            raise OSError(*words)
        return execute(self, step)

    Executor.execute = fail

sys.exit(daemon.main())
