"""``python -m transfusion``, the same as ``transfusion``."""

from transfusion.cli import main

if __name__ == "__main__":
    main()
