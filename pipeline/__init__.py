"""Shards of documents to token bins."""
