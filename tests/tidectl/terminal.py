"""A terminal for a program to write to."""

import os
import pty
import subprocess
import sys


def on_a_terminal(code: str, **variables: str) -> str:
    """What a Python program writes whose three streams are a terminal of 80 columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "", **variables}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    try:
        while data := os.read(parent, 1024):
            shown += data
    except OSError:  # how a terminal says that its last user is gone
        pass
    finally:
        os.close(parent)
    assert process.wait(20) == 0, shown
    return shown.decode()
