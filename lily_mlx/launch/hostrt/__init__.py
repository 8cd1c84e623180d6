"""The parts of the host launcher: errors, the C++ compiler, the worker process, and its C++ sources."""
