"""What the ops that shard a sequence share: contract, placement, attention of a block, transfers of a fallback."""
