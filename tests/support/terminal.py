"""What a person sees and types in a terminal."""

import os
import select
import time


class Screen:
    """The text that a process has written to a terminal, of which `terminal` is our end."""

    def __init__(self, terminal: int) -> None:
        self.terminal, self.seen = terminal, ""

    def read_until(self, *texts: str, again: bytes = b"") -> None:
        """Reads past each text; while the first does not come, `again` is typed every few seconds,
        as readline misses what comes just before it waits."""
        end = time.monotonic() + 300
        for text in texts:
            while text not in self.seen:
                ready, _, _ = select.select([self.terminal], [], [], 5)
                assert time.monotonic() < end, self.seen
                if ready:
                    piece = os.read(self.terminal, 4096).decode(errors="replace")
                    self.seen += piece.replace("\r", "")
                elif again:
                    self.type(again)
            self.seen, again = self.seen.partition(text)[2], b""

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)
