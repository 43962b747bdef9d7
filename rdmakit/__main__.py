"""``python -m rdmakit``."""

from rdmakit.cli import main

main()
