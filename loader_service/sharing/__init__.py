"""What the ranks of a node read once for all of them: the decision, staging in shared memory, read-ahead."""
