"""All checks, in the order in which a person reads them."""

from tidectl.doctor import disks, links, memory, nodes, served, software, weights
from tidectl.doctor.check import Check

DEEP_S = 6 * 3600.0

CHECKS: tuple[Check, ...] = (
    Check("profile", served.profile),
    Check("running", served.running),
    Check("state.directory", served.state),
    Check("state.keys", served.keys, needs="profile"),
    Check("ports", served.ports, needs="profile"),
    Check("memory.cache", memory.cache),
    Check("memory.swap", memory.swap),
    Check("memory.cma", memory.cma),
    Check("memory.limit", memory.limit),
    Check("memory.locked", memory.locked),
    Check("kernel.log", memory.kernel_log),
    Check("gpu.driver", software.driver),
    Check("node.ssh", nodes.ssh, limit_s=40, needs="peers"),
    Check("node.clock", nodes.clock, limit_s=40, needs="peers"),
    Check("link.interface", links.interface, needs="pair"),
    Check("link.halves", links.halves, needs="pair"),
    Check("link.gid", links.gid, needs="pair"),
    Check("link.mtu", links.mtu, limit_s=20, needs="pair"),
    Check("weights.fetched", weights.fetched, needs="profile"),
    Check("disk.direct", disks.direct, needs="profile"),
    Check("disk.free", disks.free, needs="profile"),
    Check("gpu.cuda", software.cuda, limit_s=130, needs="profile"),
    Check("gpu.ptxas", software.ptxas, limit_s=130, needs="profile"),
    Check("weights.inventory", weights.inventory, limit_s=130, needs="profile"),
    Check("memory.available", memory.available, limit_s=130),
    Check("weights.packs", weights.packs, limit_s=130, needs="profile"),
    Check("disk.rate", disks.rate, limit_s=130, needs="profile"),
    Check("link.collective", links.collective, limit_s=90, needs="profile"),
    Check("weights.sums", weights.sums, limit_s=DEEP_S, needs="profile", deep=True),
    Check("weights.pack_sums", weights.pack_sums, limit_s=DEEP_S, needs="profile", deep=True),
)
