"""Is everything that a GPU does here right, and how fast is it? One command on the device, rehearsed without one."""
