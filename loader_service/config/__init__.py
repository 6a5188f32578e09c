"""The YAML file and its schema: strict, validated whole, with line and key path in every error."""
