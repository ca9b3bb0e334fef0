"""What the system says of a failed connection, without the numbers, addresses and classes around it."""

import os
import ssl


def system_words(problem: BaseException) -> str:
    """`connection refused`, `address already in use`: the end of a sentence."""
    cause = getattr(problem, "os_error", problem)  # aiohttp puts its own sentence around it
    if isinstance(cause, ssl.SSLError):
        words = (cause.reason or "the TLS handshake failed").replace("_", " ")
    elif isinstance(cause, OSError) and cause.errno:  # a name that is not found has a number of its own, below 0
        words = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    else:
        words = str(cause) or type(cause).__name__
    return words[:1].lower() + words[1:] if not words.isupper() else words.lower()
