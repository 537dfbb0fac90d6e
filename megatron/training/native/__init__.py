"""The engine of torch alone: weights whole or cut by `fully_shard`, and torch's optimizers."""
