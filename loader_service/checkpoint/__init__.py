"""What lies in a checkpoint: dtypes, validated headers, the index, the catalog, and finding the shards."""
