"""The command line: one file a command, `main.py` parses and reports errors."""
