"""The other nodes: whether ssh gets there, and whether their clocks agree with ours."""

from tidectl.doctor.check import Finding, View, fail, ok, warn
from tidectl.peers import is_late


def ssh(view: View) -> Finding:
    wrong = [peer for peer in view.peers_asked if peer.fault]
    if wrong:
        host = wrong[0].host
        fix = f"`ssh -oBatchMode=yes {host} true` must work without a question: keys and names are ssh's business"
        return fail("; ".join(f"{peer.host}: {peer.fault}" for peer in wrong), fix)
    return ok(", ".join(f"{peer.host} answers in {peer.trip_s:.1f} s" for peer in view.peers_asked))


def clock(view: View) -> Finding:
    """Nothing is decided by a clock, but logs of two nodes are read together by it."""
    known = [peer for peer in view.peers_asked if not peer.fault]
    if not known:
        return warn("no other node answers", "see node.ssh")
    seen = ", ".join(f"{peer.host} {peer.ahead_s:+.2f} s (within {peer.trip_s / 2:.2f})" for peer in known)
    if any(is_late((peer.ahead_s, peer.trip_s / 2)) for peer in known):
        return warn(seen, "let both follow one clock: `timedatectl set-ntp true`")
    return ok(seen)
