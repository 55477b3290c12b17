"""Whether an engine makes steps while there is work for it (contract C10): a loop beats on while its engine hangs."""


class Progress:
    """Of one engine. Times are seconds of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._seq, self._since_s = -1, now_s

    def stalled_s(self, seq: int, has_work: bool, now_s: float) -> float:
        """How long the engine has had work and finished no step; `seq` is the last step that it finished."""
        if seq != self._seq or not has_work:
            self._seq, self._since_s = seq, now_s
        return now_s - self._since_s
