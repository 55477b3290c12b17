"""A link between two nodes on one machine: a network namespace for rank 1, a pair of virtual devices between it and
this one. Needs the right to make them (root, or `unshare --map-root-user --net`)."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

TOOLS = ("ip", "tc", "unshare", "nsenter")
NETMASK = 30


class Link:
    """`inside`: what a command begins with to run on the other node."""

    def __init__(self) -> None:
        self._name = f"tf{os.getpid() % 100_000}"
        block = os.getpid() % 60
        self.here, self.there = f"10.99.77.{4 * block + 1}", f"10.99.77.{4 * block + 2}"
        self._node = subprocess.Popen(["unshare", "--net", "sleep", "36000"])
        self.inside = ["nsenter", f"--net=/proc/{self._node.pid}/ns/net"]
        try:
            self._wait_for_the_namespace()
            run("ip", "link", "add", self._name, "type", "veth", "peer", "name", "eth0", "netns", str(self._node.pid))
            run("ip", "address", "add", f"{self.here}/{NETMASK}", "dev", self._name)
            run(*self.inside, "ip", "address", "add", f"{self.there}/{NETMASK}", "dev", "eth0")
            for command in (("eth0", self.inside), ("lo", self.inside), (self._name, [])):
                run(*command[1], "ip", "link", "set", command[0], "up")
        except BaseException:
            self.close()
            raise

    def _wait_for_the_namespace(self) -> None:
        own, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + 10
        while Path(f"/proc/{self._node.pid}/ns/net").readlink() == own:
            if time.monotonic() > deadline or self._node.poll() is not None:
                raise OSError("no network namespace can be made here")
            time.sleep(0.01)

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        run(*self.inside, "ip", "link", "set", "eth0", "down")

    def slow(self, rate: str = "8mbit") -> None:
        for inside, device in (([], self._name), (self.inside, "eth0")):
            run(*inside, *f"tc qdisc replace dev {device} root tbf rate {rate} burst 16kb latency 200ms".split())

    def heal(self) -> None:
        run(*self.inside, "ip", "link", "set", "eth0", "up")
        for inside, device in (([], self._name), (self.inside, "eth0")):
            subprocess.run([*inside, "tc", "qdisc", "delete", "dev", device, "root"], capture_output=True, timeout=10)

    def close(self) -> None:
        """The devices go with the namespace."""
        self._node.kill()
        self._node.wait(10)
        with suppress(OSError):
            subprocess.run(["ip", "link", "delete", self._name], capture_output=True, timeout=10)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why there can be no such link here; empty: there can."""
    try:
        link = Link()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces here: {error}"
    try:
        link.slow()
        link.heal()
        link.cut()
    except OSError as error:
        return f"the link cannot be slowed here: {error}"
    finally:
        link.close()
    return ""
