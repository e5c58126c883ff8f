"""Index arithmetic shared by all backends.

Every function works on Python integers, torch tensors and kernel expressions alike; all operands are
non-negative integers.
"""

from __future__ import annotations


def ring_slot(slot, position, ring_size):
    """Flat index of `position` in the ring of state slot `slot`."""
    return slot * ring_size + position % ring_size


def num_visible(position, ratio):
    """Compressed entries that the query at `position` may see: the group that ends at it is visible to it."""
    return (position + 1) // ratio


def entry_block(entry, entries_per_block):
    """Logical block of a compressed entry."""
    return entry // entries_per_block


def entry_slot(block, entry, entries_per_block):
    """Flat index of a compressed entry that lives in physical block `block`."""
    return block * entries_per_block + entry % entries_per_block
