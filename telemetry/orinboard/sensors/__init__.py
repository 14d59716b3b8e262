"""Readers of one kind of sensor each: files of the kernel, or a library, to `Readings`."""
