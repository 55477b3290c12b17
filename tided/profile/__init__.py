"""A profile: one TOML file -> `tided.settings.Settings`.

`check` finds every problem of a file at once; `load` returns the settings or raises them all as one ConfigError.
`load_for_start` also refuses what is valid but cannot be served by this build on this machine.

Relative paths (`model.path`, `tide.seed`, `parallel.key_file`, `server.api_keys_file`) are resolved against the
directory of the profile, so that a profile means the same wherever it is started from; `~` is the user's home.
"""

from tided.profile.loader import check, load, load_for_start
from tided.profile.problems import Problem, render

__all__ = ["Problem", "check", "load", "load_for_start", "render"]
