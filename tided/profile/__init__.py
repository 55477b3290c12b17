"""A profile: one TOML file -> `tided.settings.Settings`.

`check` finds every problem of a file at once; `load` returns the settings or raises them all as one ConfigError.
Before a start, `refuse_unread` and `refuse_missing` refuse what is valid but cannot be served by this build on this
machine.

Relative paths (`model.path`, `tide.seed`, `parallel.key_file`, `server.api_keys_file`) are resolved against the
directory of the profile, so that a profile means the same wherever it is started from; `~` is the user's home.
"""

from tided.profile.loader import check, load
from tided.profile.problems import Problem, render
from tided.profile.start import refuse_missing, refuse_unread

__all__ = ["Problem", "check", "load", "refuse_missing", "refuse_unread", "render"]
