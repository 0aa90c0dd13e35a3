"""What bins hold: documents, tokens and bytes of each subset, summed over receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.tokenbin import Receipt

if TYPE_CHECKING:
    from rich.table import Table

COUNTED = ("documents", "tokens", "text_bytes")


def totals(split: str, receipts: Sequence[Receipt]) -> dict[str, Any]:
    """The sums over the bins of a split, ready for JSON; the largest subset first."""
    subsets: dict[str, dict[str, int]] = {}
    for receipt in receipts:
        for name, counts in receipt.subsets.items():
            sums = subsets.setdefault(name, dict.fromkeys(COUNTED, 0))
            for field in COUNTED:
                sums[field] += getattr(counts, field)
    rejects: dict[str, int] = {}
    for receipt in receipts:
        for reason, count in receipt.rejects.items():
            rejects[reason] = rejects.get(reason, 0) + count
    return {
        "split": split,
        "bins": len(receipts),
        **{field: sum(getattr(receipt, field) for receipt in receipts) for field in COUNTED},
        "max_id": max((receipt.max_id for receipt in receipts), default=-1),
        "rejects": rejects,
        "subsets": dict(
            sorted(subsets.items(), key=lambda item: item[1]["text_bytes"], reverse=True)
        ),
    }


def table(sums: dict[str, Any]) -> Table:
    """The same for the eye."""
    from rich.table import Table

    bins = "1 bin" if sums["bins"] == 1 else f"{sums['bins']} bins"
    shown = Table(title=f"{sums['split']}: {bins}", title_justify="left")
    for heading in ("subset", "documents", "tokens", "bytes of text", "tokens a byte"):
        shown.add_column(heading, justify="left" if heading == "subset" else "right")
    for name, counts in (*sums["subsets"].items(), ("all", sums)):
        share = counts["tokens"] / counts["text_bytes"] if counts["text_bytes"] else 0.0
        shown.add_row(name, *(f"{counts[field]:,}" for field in COUNTED), f"{share:.4f}")
    return shown
