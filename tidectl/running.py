"""What runs here."""


def running_url() -> str | None:
    return None
