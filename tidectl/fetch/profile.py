"""Where the files of a profile belong, and on which nodes."""

from pathlib import Path

from tidectl import profiles
from tidectl.fetch.options import Options
from tidectl.nodes import local_ranks
from tidectl.sent import text_for_peer
from tided.errors import UsageError
from tided.profile import load


def for_profile(options: Options, profile: str) -> Options:
    """The profile's own directory and its other nodes, unless the options name others."""
    settings = load(profiles.find(profile))
    wanted = settings.model.dense if options.dense else settings.model.path
    if not (options.to or wanted):
        raise UsageError(f"{profile} names no model.dense", hint="name a directory with --to")
    here = local_ranks(settings.parallel)
    hosts = [host for rank, host in enumerate(settings.parallel.hosts) if rank not in here]
    others = tuple(dict.fromkeys(host for host in hosts if host not in options.nodes))
    found = options._replace(to=options.to or Path(wanted), nodes=(*options.nodes, *others))
    return found if options.to else found._replace(profile=profile, sent=text_for_peer(settings))
