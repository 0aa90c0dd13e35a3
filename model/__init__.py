"""The LLaMA."""
