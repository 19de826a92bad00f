"""Who has not been used for longer than its time to live.

Not here: any clock, or the dropping.
"""

from __future__ import annotations

import heapq
import math


class ExpiryQueue:
    """Sessions by when they expire. A change costs O(log n) at most, nothing is scanned.

    Times are seconds of any one clock. Belongs to the thread that keeps the books.
    """

    def __init__(self) -> None:
        self._expires_s: dict[str, float] = {}
        # At least one item for each session, none later than its expiry: one put off is only found out when it is due.
        self._due: list[tuple[float, str]] = []
        self._first_due: dict[str, float] = {}  # The earliest item of each session.

    def __len__(self) -> int:
        return len(self._expires_s)

    def set(self, key: str, used_s: float, ttl_s: float | None) -> None:
        """Says that a session was used at `used_s` and lives `ttl_s` seconds from then on; None: for ever.

        Raises:
          ValueError: ttl_s is negative or not finite.
        """
        check_ttl(ttl_s)
        if ttl_s is None:
            self.discard(key)
            return
        expires_s = used_s + ttl_s
        self._expires_s[key] = expires_s
        if expires_s < self._first_due.get(key, math.inf):
            self._first_due[key] = expires_s
            heapq.heappush(self._due, (expires_s, key))
            self._compact()

    def discard(self, key: str) -> None:
        """Forgets a session, if it is known."""
        self._expires_s.pop(key, None)

    def pop_expired(self, now_s: float) -> tuple[str, ...]:
        """Takes out all sessions whose time is over at `now_s`, the longest expired first.

        Whoever cannot let one go now, since it is pinned or in use, sets it again when it was used.
        """
        expired: list[tuple[float, str]] = []
        while self._due and self._due[0][0] <= now_s:
            due_s, key = heapq.heappop(self._due)
            if self._first_due.get(key) != due_s:
                continue  # An earlier item of the session stood for this one.
            del self._first_due[key]
            expires_s = self._expires_s.get(key)
            if expires_s is None:
                continue
            if expires_s <= now_s:
                del self._expires_s[key]
                expired.append((expires_s, key))
            else:
                self._first_due[key] = expires_s
                heapq.heappush(self._due, (expires_s, key))
        return tuple(key for _, key in sorted(expired))

    def _compact(self) -> None:
        """Lets go of what discarded sessions left behind, once it is most of what is kept: O(1) on average."""
        if len(self._due) > 2 * len(self._expires_s) + 1000:
            self._first_due = dict(self._expires_s)
            self._due = [(expires_s, key) for key, expires_s in self._expires_s.items()]
            heapq.heapify(self._due)


def check_ttl(ttl_s: float | None) -> None:
    """Refuses a time to live that is none.

    Raises:
      ValueError: ttl_s is negative or not finite.
    """
    if ttl_s is not None and not (math.isfinite(ttl_s) and ttl_s >= 0):
        raise ValueError(f"ttl_s wanted a number of seconds >= 0, or None, found {ttl_s}")
