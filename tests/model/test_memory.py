"""Refusals by arithmetic."""

from __future__ import annotations

import pytest
import torch

from model.memory import NotEnoughMemoryError, available_bytes, require_memory

CPU = torch.device("cpu")


def test_the_machine_has_a_plausible_amount_of_memory() -> None:
    """A wrong unit would refuse every model, or none."""
    assert 2**28 < available_bytes(CPU) < 2**50


def test_what_fits_passes_and_what_does_not_is_named_with_both_numbers() -> None:
    """Who gets the refusal must see how far off the model is."""
    available = available_bytes(CPU)
    require_memory(available, CPU, "a small model")
    expected = rf"^a large model takes .* GB, but cpu has {available / 1e9:,.1f} GB"
    with pytest.raises(NotEnoughMemoryError, match=expected):
        require_memory(available + 1, CPU, "a large model")
