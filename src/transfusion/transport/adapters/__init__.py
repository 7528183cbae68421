"""PEFT adapters, read from their own files without PEFT: same kind in, same kind out."""
