"""Token bins and a model to a run directory."""
