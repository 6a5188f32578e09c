"""What the project makes with its own code, beside the package."""
