"""The documented path of `parallelize.ops.all_to_all` before it moved there."""

from parallelize.ops.all_to_all import exchange as exchange
from parallelize.ops.all_to_all import exchange_shards as exchange_shards
