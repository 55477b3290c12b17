"""The mini pair as a service in a box, on one node or on two; on one as two instances, with shorter times."""

import time

TIDECTL = "/opt/tidelm/bin/tidectl"
PORT = 8000
KEY = "key-of-a-test"
RANKS = ("tided@pair:0.service", "tided@pair:1.service")

MINI = """
[model]
path = "{minis}/deepseek"
served_name = "mini"
[experts]
resident = 312
spare_slots = 8
read_threads = 2
[cache]
context_tokens = 4096
pool_tokens = 8192
[parallel]
ranks = 2
"""
SERVED = """step_timeout_s = 20
peer_timeout_s = 8
{parallel}
[server]
api_keys_credential = "api-keys"
thinking = false
"""

SHORTER = """
[Service]
RestartSec=1
WatchdogSec=12
TimeoutAbortSec=3
"""


def install_service(inside):
    inside(TIDECTL, "service", "install", "--prefix", "/opt/tidelm")


def write_profile(inside, parallel):
    """The mini's, with these lines of [parallel] and all that follows them."""
    site = inside("/opt/tidelm/venv/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    inside.write("/etc/tidelm/pair.toml", MINI.format(minis=f"{site}/minis") + parallel)


def prepare(inside, parallel=""):
    install_service(inside)
    inside.write("/etc/systemd/system/tided@.service.d/shorter.conf", SHORTER)
    inside("systemctl", "daemon-reload")
    write_profile(inside, SERVED.format(parallel=parallel))
    inside.write("/etc/tidelm/api-keys", KEY + "\n", mode=0o600)


def asked(inside, words="What is the capital of Norway?"):
    return inside.ask(PORT, words, key=KEY)["choices"][0]["message"]["content"]


def restarted(inside, before, timeout_s=240):
    """Both ranks serve again, as other processes; how often each was started again since."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        now = {unit: inside.show(unit, "ActiveState", "MainPID", "NRestarts") for unit in RANKS}
        new = [now[unit]["MainPID"] not in ("0", before[unit]["MainPID"]) for unit in RANKS]
        if all(new) and {state["ActiveState"] for state in now.values()} == {"active"}:
            return [int(now[unit]["NRestarts"]) - int(before[unit]["NRestarts"]) for unit in RANKS]
        assert time.monotonic() < deadline_s, "\n".join(inside.journal(unit) for unit in RANKS)
        time.sleep(0.2)


def facts(inside):
    return {unit: inside.show(unit, "MainPID", "NRestarts") for unit in RANKS}
