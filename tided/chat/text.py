"""Small rules about text that prompts, replies and parsers share."""


def well_formed(text: str) -> str:
    r"""`text` with every unpaired surrogate (JSON's "\ud800") as U+FFFD, so that it has a UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shorten(value: object, limit: int = 200) -> str:
    """One line for an error message: a client's value, cut to `limit` characters."""
    line = " ".join(well_formed(str(value)[: limit + 1]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
