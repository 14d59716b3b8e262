"""The path of a CPU: one C program."""
