"""Planning: the device, dtype and memory of each parameter, before any data is read."""
