"""The engine of torch alone: full or sharded (`fully_shard`) weights, and torch's optimizers."""
