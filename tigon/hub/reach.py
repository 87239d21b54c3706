"""Whether the hub answers: told within seconds, where its library would try for minutes."""

import threading
from collections.abc import Callable

from huggingface_hub import constants

REACH_SECONDS = 5.0  # for the hub's first answer, unless HF_HUB_ETAG_TIMEOUT says otherwise


def reach_seconds() -> float:
    told = constants.HF_HUB_ETAG_TIMEOUT
    return REACH_SECONDS if told == constants.DEFAULT_ETAG_TIMEOUT else told


def why_unreachable(ask: Callable[[float], object]) -> str | None:
    """What keeps the hub from answering `ask`, a request with so many seconds of time; None: it has
    answered, perhaps with an error."""
    seconds = reach_seconds()
    faults: list[str] = []

    def run() -> None:
        try:
            ask(seconds)
        except (OSError, ValueError):  # its answer, a bad name, offline: who goes on explains them
            pass
        except Exception as error:  # of the HTTP client, whichever the hub's library has
            faults.append(str(error) or type(error).__name__)

    # A thread, since looking up the address of a host has no time limit
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    if thread.is_alive():
        return f"no answer in {seconds + 1:g} s"
    return faults[0] if faults else None
