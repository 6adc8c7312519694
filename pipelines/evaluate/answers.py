"""What a generated answer looks like, whatever it was scored. Pure."""

from __future__ import annotations

LONGEST_PIECE = 200
LEAST = 40
REPEATS = 4


def looping(text: str) -> bool:
    """Whether an answer ends by saying the same piece four times or more, 40 characters in all, perhaps cut inside."""
    tail = text.rstrip()
    for period in range(1, min(LONGEST_PIECE, len(tail) // REPEATS) + 1):
        wanted, same = max(LEAST, REPEATS * period) - period, 0
        while same < wanted and same < len(tail) - period and tail[-1 - same] == tail[-1 - same - period]:
            same += 1
        if same == wanted:
            return True
    return False
