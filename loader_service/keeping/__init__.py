"""The resident service: what it keeps of loads for workers on its node, and how they come by it."""
