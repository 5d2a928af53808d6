"""Text that exists on every machine: the topics of Python's documentation, one document each."""

from __future__ import annotations


def documents() -> list[str]:
    """The texts, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[key] for key in sorted(topics)]
