"""A sample of the documents of many shards, for training a tokenizer.

Each document draws a number from (seed, shard, line), and those with the smallest numbers are the
sample. So it is uniform over all the shards without knowing their sizes, it takes the memory of
the sample only, and neither the order of the shards nor who reads them changes it.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from hashlib import blake2b

from pipeline.shards import Shard, ShardReader

LONGEST_DOCUMENT_BYTES = 1_000_000  # the rest of a longer one is left out: one book is no corpus

log = logging.getLogger(__name__)


def draw(shards: Sequence[Shard], sample_bytes: int, seed: int) -> list[bytes]:
    """Texts in UTF-8: at least `sample_bytes` and one document at most more, or all there is.

    Raises:
        ShardError: a shard cannot be read.
    """
    drawn: list[tuple[int, bytes]] = []  # a heap with the largest number on top
    drawn_bytes = 0
    for shard in shards:
        reader = ShardReader(shard)
        key = blake2b(f"{seed}:{shard.name}".encode(), digest_size=32).digest()
        for batch in reader:
            for text, line in zip(batch.texts, batch.lines, strict=True):
                digest = blake2b(line.to_bytes(8, "big"), digest_size=8, key=key).digest()
                number = int.from_bytes(digest, "big")
                if drawn_bytes >= sample_bytes and number > -drawn[0][0]:
                    continue
                content = text[:LONGEST_DOCUMENT_BYTES].encode()[:LONGEST_DOCUMENT_BYTES]
                heapq.heappush(drawn, (-number, content))
                drawn_bytes += len(content)
                while drawn_bytes - len(drawn[0][1]) >= sample_bytes:
                    drawn_bytes -= len(heapq.heappop(drawn)[1])
        log.info(
            "%s: %s documents read, %s rejected; the sample has %.1f MB",
            shard.name,
            f"{reader.num_documents:,}",
            f"{reader.num_rejects:,}",
            drawn_bytes / 1e6,
        )
    return [content for _, content in sorted(drawn, reverse=True)]
