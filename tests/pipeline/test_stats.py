"""What bins hold, summed."""

from io import StringIO

from rich.console import Console

from pipeline.stats import table, totals
from pipeline.tokenbin import Counts, Receipt


def receipt(shard: str, subsets: dict[str, Counts], rejects: dict[str, int]) -> Receipt:
    return Receipt(
        shard=shard,
        split="train",
        source=None,
        documents=sum(counts.documents for counts in subsets.values()),
        tokens=sum(counts.tokens for counts in subsets.values()),
        text_bytes=sum(counts.text_bytes for counts in subsets.values()),
        max_id=len(subsets),
        subsets=subsets,
        rejects=rejects,
        sha256={},
        encoder="",
        versions={},
    )


def test_subsets_are_summed_over_bins() -> None:
    """Their shares are what the corpus is chosen by."""
    small, large = (
        Counts(documents=1, tokens=2, text_bytes=3),
        Counts(documents=4, tokens=5000, text_bytes=9000),
    )
    receipts = [
        receipt("00", {"a": small, "b": large}, {"not JSON": 1}),
        receipt("01", {"b": large}, {"not JSON": 2, "no text": 1}),
    ]
    sums = totals("train", receipts)
    assert sums == {
        "split": "train",
        "bins": 2,
        "documents": 9,
        "tokens": 10_002,
        "text_bytes": 18_003,
        "max_id": 2,
        "rejects": {"not JSON": 3, "no text": 1},
        "subsets": {
            "b": {"documents": 8, "tokens": 10_000, "text_bytes": 18_000},
            "a": {"documents": 1, "tokens": 2, "text_bytes": 3},
        },
    }
    console = Console(file=StringIO(), width=100)
    console.print(table(sums))
    shown = console.file.getvalue()
    assert "10,002" in shown
    assert "0.5556" in shown
    assert totals("val", [])["max_id"] == -1
