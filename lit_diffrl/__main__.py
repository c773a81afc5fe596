"""``python -m lit_diffrl``."""

from lit_diffrl.cli import main

if __name__ == "__main__":
    main()
