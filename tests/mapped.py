"""What the system says of this process's memory."""

import re
from pathlib import Path


def flags_of(at: int) -> list[str]:
    """Of the part of memory that holds this address, as /proc/self/smaps abbreviates them: `hg` huge pages are asked
    for, `dc` a child has none of it, `sh` shared."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {at:x}")
