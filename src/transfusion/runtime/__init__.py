"""What the program needs of its machine: engines, threads, memory, devices, libraries, untrusted files."""
