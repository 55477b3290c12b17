"""Every error that TideLM raises on purpose.

TideError                    what happened, where, what to do; `exit_code` when it ends a process
├── UsageError          2    a command was called wrongly
├── ConfigError        78    a profile, a setting or a key is wrong
├── NotRunningError     3    the daemon asked for does not run
├── UnavailableError   69    something needed is missing: a port, a peer, a device
├── DataError          65    a checkpoint, pack, history or cache file is missing, damaged or foreign
│   └── TensorError    65    one tensor of a checkpoint is missing, extra or misshapen
├── GuardError         78    the ranks differ in a setting that must be equal
├── PairError          70    a rank died, hung or diverged while serving; restart the pair
├── PermissionError_   77    a file or a device may not be used by this user
└── RequestError        -    one request is wrong; the daemon goes on (`status`, `code`, `param` for its reply)
    ├── ContextOverflowError
    └── QueueFullError
"""

from typing import ClassVar


class TideError(Exception):
    """`what` happened, `where` (file:line, tensor, rank), and the next step for the person who reads it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  {self.hint}" if self.hint else text


class UsageError(TideError):
    exit_code = 2


class ConfigError(TideError):
    exit_code = 78


class NotRunningError(TideError):
    exit_code = 3


class UnavailableError(TideError):
    exit_code = 69


class DataError(TideError):
    exit_code = 65


class TensorError(DataError):
    pass


class GuardError(TideError):
    exit_code = 78


class PairError(TideError):
    exit_code = 70


class PermissionError_(TideError):
    exit_code = 77


class RequestError(TideError):
    """A fault of one request. `status` is the HTTP status, `code` and `param` go into the reply."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(what)
        self.status, self.kind, self.code, self.param = status, kind, code, param


class ContextOverflowError(RequestError):
    """The prompt, or the prompt and the answer asked for, do not fit the context.

    `counted`: whether `prompt_tokens` is the whole prompt; counting stops behind the context.
    """

    def __init__(self, context_tokens: int, prompt_tokens: int, max_tokens: int, *, counted: bool = True) -> None:
        more = "" if counted else "more than "
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{more}{prompt_tokens + max_tokens} tokens "
            f"({more}{prompt_tokens} in the messages, {max_tokens} in the completion).",
            code="context_length_exceeded",
            param="messages",
        )
        self.context_tokens, self.prompt_tokens, self.max_tokens = context_tokens, prompt_tokens, max_tokens
        self.counted = counted


class QueueFullError(RequestError):
    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"the queue is full: {waiting} requests have not begun; try again in a moment",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
        )


def told(error: BaseException) -> str:
    """Of an error that is none of ours: what everybody may know. Its own words may hold a path, or what was asked;
    they belong into the log, and nowhere else."""
    kind = type(error).__name__
    return f"{kind}: {error.strerror}" if isinstance(error, OSError) and error.strerror else kind
