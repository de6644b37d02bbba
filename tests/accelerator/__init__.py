"""A device without hardware, for tests of device discipline with real values: see :mod:`tests.accelerator.device`."""
