"""The command line: commands, exit codes, tables and the demo."""
