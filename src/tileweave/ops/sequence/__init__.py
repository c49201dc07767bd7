"""What the ops that shard a sequence share: contract, operator, launch, placement, attention of a block, transfers."""
