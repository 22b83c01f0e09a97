"""How much one blocking read may bring: Redis bounds it in entries per stream, memory needs it in bytes. PURE.

Promises: where the entries are about as large as those of the reads before, one read brings about `READ_BYTES`, however
          much waits in however many streams; a stream that is alone in having more is soon read in large pieces.
Used by:  store.redis.Reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a process that stood still is brought at once as it wakes: it is in memory a few times over, until it is sent.
READ_BYTES = 4 * 1024 * 1024
ENTRIES_MAX = 1000
# Of an entry beside its values: the dict, the strings, the id.
ENTRY_OVERHEAD_BYTES = 1000
# Of a large read about so many entries are measured, of each stream one at least: it is done for every read.
SAMPLE_ENTRIES = 50


@dataclass(slots=True)
class ReadBound:
    """What is known of one reader's reads. `entry_bytes`: the size of an entry, as of late."""

    entry_bytes: float = 4 * 1024
    _asked: int = 0
    _boost: int = 1

    def count(self, streams: int) -> int:
        """How many entries of each of so many streams to ask for."""
        cautious = READ_BYTES / (self.entry_bytes * streams)  # as if all of them had as much
        self._asked = max(1, min(ENTRIES_MAX, int(cautious * self._boost)))
        return self._asked

    def learn(self, found: Sequence[Sequence[tuple[str, Mapping[bytes, bytes]]]]) -> None:
        """Count what was read, by stream."""
        entries = sum(map(len, found))
        if not entries:
            return
        step = entries // SAMPLE_ENTRIES + 1
        sample = [fields for stream in found for _, fields in stream[::step]]
        mean = sum(sum(map(len, fields.values())) for fields in sample) / len(sample) + ENTRY_OVERHEAD_BYTES
        # Up at once and down slowly: an estimate that is too low costs memory, one too high a few round trips.
        self.entry_bytes = max(mean, 0.9 * self.entry_bytes + 0.1 * mean)
        if mean * entries > READ_BYTES / 2 or not any(len(stream) >= self._asked for stream in found):
            self._boost = 1
        elif self._asked < ENTRIES_MAX:
            self._boost *= 2
